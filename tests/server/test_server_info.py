"""GetServerInfo: the server fills every field, and the client reads every field."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from rollwire.types import CommittedUpdate, LogprobBasis, ServerState, SleepingWeights, WeightTag
from rollwire.v1 import rollout_pb2
from rollwire_client import ServerInfo
from rollwire_client._rpc.conversion import server_info_from_proto
from rollwire_server.counters import ServerCounters
from rollwire_server.engines.base import EngineInfo, EngineLoad
from rollwire_server.rpc.rollout_service import RolloutService

FIELDS = {field.name for field in rollout_pb2.GetServerInfoResponse.DESCRIPTOR.fields}


async def busy_server() -> rollout_pb2.GetServerInfoResponse:
    """Of a server of which nothing is zero, empty or false."""
    engine = EngineInfo(
        engine="synthetic", model="none", device=torch.device("cpu"), staging="host",
        staging_bytes=1, vocab_size=9, context_length=9, eos_token_ids=(1,),
        logprob_bases=frozenset(LogprobBasis), deterministic=True, max_running_sequences=9,
        max_top_logprobs=9, routed_experts=True, sampling_parameters=frozenset({"seed"}),
        deltas=True,
    )  # fmt: skip
    load = EngineLoad(running=1, waiting=1, kv_tokens_used=1, kv_tokens_total=9)
    weights = SimpleNamespace(current=WeightTag(3, 1, "s", 7), highest_version=3)
    activity = dict.fromkeys(("running", "waiting", "held"), 1)
    state = SimpleNamespace(check=lambda _: None, current=ServerState.PAUSED, pauses={"p": 1.0})
    parts: list[Any] = [
        SimpleNamespace(describe=lambda: engine, load=lambda: load),
        state,
        SimpleNamespace(by_activity=lambda: activity),
        SimpleNamespace(
            frozen=False,
            transports=["gloo"],
            weights=weights,
            last_update=CommittedUpdate("delta", received_bytes=9, changed_share=0.01),
        ),
        SimpleNamespace(sleeping_weights=SleepingWeights.DISCARD),
        ServerCounters(sampled_tokens=5),
        None,
    ]
    service = RolloutService("s", *parts, 1)
    context: Any = None
    return await service.GetServerInfo(rollout_pb2.GetServerInfoRequest(), context)


async def test_a_server_fills_every_field() -> None:
    assert {field.name for field, _ in (await busy_server()).ListFields()} == FIELDS


async def test_a_client_reads_every_field() -> None:
    assert {field.name for field in dataclasses.fields(ServerInfo)} == FIELDS | {"address"}
    read = dataclasses.asdict(server_info_from_proto(await busy_server(), "here:1"))
    empty = dataclasses.asdict(server_info_from_proto(rollout_pb2.GetServerInfoResponse(), ""))
    assert [name for name in read if read[name] == empty[name]] == []
