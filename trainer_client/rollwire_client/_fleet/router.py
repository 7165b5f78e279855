"""Which of the servers that are ready gets a sequence."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire.v1 import rollout_pb2

    from rollwire_client._fleet.server_handle import ServerHandle

STICK_TOKENS = 4096
"""A session leaves its server once that has more outstanding tokens than twice those of the least
busy one, and this many more. Leaving costs the prefix cache: the next server reads the conversation
again, which takes about as long as a few thousand tokens of the others' decoding. Twice, so that it
does not leave for a difference which its own next turn would turn round."""

_SESSIONS = 100_000  # so many are remembered, the latest


class Router:
    """Sends a sequence to the server with the fewest outstanding tokens, and a session's sequences
    to the server that has their prefix, unless that is clearly busier.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[str, tuple[ServerHandle, str]] = OrderedDict()

    def choose(
        self, servers: Sequence[ServerHandle], request: rollout_pb2.GenerateRequest
    ) -> ServerHandle:
        """One of ``servers``: at least one, all with weights that the request takes, if any has."""
        least = min(servers, key=lambda member: member.outstanding_tokens)
        if not (session := request.session_id):
            return least
        home, server_id = self._homes.pop(session, (least, least.server_id))
        stays = (
            home in servers
            and home.server_id == server_id  # a process that was restarted has no prefix
            and home.outstanding_tokens <= 2 * least.outstanding_tokens + STICK_TOKENS
        )
        chosen = home if stays else least
        self._homes[session] = chosen, chosen.server_id
        if len(self._homes) > _SESSIONS:
            self._homes.popitem(last=False)
        return chosen
