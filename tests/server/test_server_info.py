"""GetServerInfo: the server fills every field, and the client reads every field."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from rollwire.types import LogprobBasis, ServerState, WeightTag
from rollwire.v1 import rollout_pb2
from rollwire_client import ServerInfo
from rollwire_client._rpc.conversion import server_info_from_proto
from rollwire_server.counters import ServerCounters
from rollwire_server.engines.base import EngineInfo, EngineLoad
from rollwire_server.rpc.server_info import ServerInfoBuilder
from rollwire_transport import ListenOptions

FIELDS = {field.name for field in rollout_pb2.GetServerInfoResponse.DESCRIPTOR.fields}


def busy_server() -> rollout_pb2.GetServerInfoResponse:
    """Of a server of which nothing is zero, empty or false."""
    engine = EngineInfo(
        engine="synthetic", model="none", device=torch.device("cpu"), staging="host",
        staging_bytes=1, vocab_size=9, context_length=9, eos_token_ids=(1,),
        logprob_bases=frozenset(LogprobBasis), deterministic=True, max_running_sequences=9,
        max_top_logprobs=9, routed_experts=True, sampling_parameters=frozenset({"seed"}),
    )  # fmt: skip
    load = EngineLoad(running=1, waiting=1, kv_tokens_used=1, kv_tokens_total=9)
    weights = SimpleNamespace(current=WeightTag(3, 1, "s", 7), highest_version=3)
    return ServerInfoBuilder(
        "s",
        SimpleNamespace(describe=lambda: engine, load=lambda: load),  # type: ignore[arg-type]
        SimpleNamespace(current=ServerState.PAUSED, pauses={"p": 1.0}),  # type: ignore[arg-type]
        SimpleNamespace(by_activity=lambda: dict.fromkeys(("running", "waiting", "held"), 1)),  # type: ignore[arg-type]
        SimpleNamespace(frozen=False, listen=ListenOptions(), weights=weights),  # type: ignore[arg-type]
        ServerCounters(sampled_tokens=5),
    ).build()


def test_a_server_fills_every_field() -> None:
    assert {field.name for field, _ in busy_server().ListFields()} == FIELDS


def test_a_client_reads_every_field() -> None:
    assert {field.name for field in dataclasses.fields(ServerInfo)} == FIELDS | {"address"}
    read = dataclasses.asdict(server_info_from_proto(busy_server(), "here:1"))
    empty = dataclasses.asdict(server_info_from_proto(rollout_pb2.GetServerInfoResponse(), ""))
    assert [name for name in read if read[name] == empty[name]] == []
