"""GetServerInfo: what a server is, which weights it serves, and what it is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rollwire_transport as transport
from rollwire.conversion import LOGPROB_BASIS_TO_PROTO, SERVER_STATE_TO_PROTO, weight_tag_to_proto
from rollwire.types import ServerState
from rollwire.v1 import rollout_pb2

from rollwire_server import __version__

if TYPE_CHECKING:
    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.manager import UpdateManager


class ServerInfoBuilder:
    """Builds the response of GetServerInfo, also while the engine loads."""

    def __init__(
        self,
        server_id: str,
        engine: Engine,
        state: StateMachine,
        sequences: Sequences,
        updates: UpdateManager,
        counters: ServerCounters,
    ) -> None:
        self._server_id = server_id
        self._engine = engine
        self._state = state
        self._sequences = sequences
        self._updates = updates
        self._counters = counters
        backends = transport.available_backends(updates.listen)
        self._transports = [name for name, backend in backends.items() if backend.ok]

    def build(self) -> rollout_pb2.GetServerInfoResponse:
        state = self._state.current
        response = rollout_pb2.GetServerInfoResponse(
            server_id=self._server_id,
            state=SERVER_STATE_TO_PROTO[state],
            software_version=__version__,
            accepts_updates=not self._updates.frozen,
            transports=self._transports,
        )
        for pause_id, left in self._state.pauses.items():
            pause = response.pauses.add(pause_id=pause_id)
            if left is not None:
                pause.lease_left.FromMilliseconds(int(left * 1000))
        if state is not ServerState.STARTING:
            self._describe_engine(response)
        return response

    def _describe_engine(self, response: rollout_pb2.GetServerInfoResponse) -> None:
        engine, load = self._engine.describe(), self._engine.load()
        activity = self._sequences.by_activity()
        response.weights.CopyFrom(weight_tag_to_proto(self._updates.weights.current))
        if (highest := self._updates.weights.highest_version) is not None:
            response.highest_version = highest
        response.engine = engine.engine
        response.model = engine.model
        response.vocab_size = engine.vocab_size
        response.context_length = engine.context_length
        response.eos_token_ids.extend(engine.eos_token_ids)
        bases = (LOGPROB_BASIS_TO_PROTO[basis] for basis in engine.logprob_bases)
        response.logprob_bases.extend(sorted(bases))
        response.deterministic = engine.deterministic
        response.max_running_sequences = engine.max_running_sequences
        response.running_sequences = activity["running"]
        response.waiting_sequences = activity["waiting"]
        response.held_sequences = activity["held"]
        response.sampled_tokens = self._counters.sampled_tokens
        response.kv_tokens_used = load.kv_tokens_used
        response.kv_tokens_total = load.kv_tokens_total
