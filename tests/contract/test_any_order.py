"""Calls in any order against a model of what a server promises (Hypothesis)."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rollwire.v1 import common_pb2, rollout_pb2
from support.calls import Api, Generation, generate, reason_of, request
from support.examples import examples
from support.publishing import TERMS, Update, next_version, publish, random_weights

if TYPE_CHECKING:
    from support.servers import ServerProcess

LONG = 3000


@dataclass
class Live:
    """A sequence that nothing has ended yet: so long that it does not end by itself."""

    request_id: str
    generation: Generation
    bound: int | None


class Machine(RuleBasedStateMachine):
    """Holds, sequences and updates of one server, which every example gets as the last left it."""

    address: str
    pauses = Bundle("pauses")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.channel = self.run(self._connect())
        self.api = Api(self.channel)
        self.held: set[str] = set()
        self.mode = "SERVING"
        self.discarded = False
        self.live: list[Live] = []
        self.staged: Update | None = None
        self.weights = self.run(self.api.info()).weights
        self.version = self.run(next_version(self.api))

    async def _connect(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address)

    def run(self, work):  # type: ignore[no-untyped-def]
        async def bounded():  # type: ignore[no-untyped-def]
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    @property
    def state(self) -> str:
        return "PAUSED" if self.held and self.mode == "SERVING" else self.mode

    def refused(self, call) -> str:  # type: ignore[no-untyped-def]
        """The reason of a refusal."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            self.run(call)
        return reason_of(caught.value)

    def teardown(self) -> None:
        async def leave() -> None:
            await self.api.resume()
            await self.api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
            if self.staged is not None:
                await self.staged.discard()
            await self.api.rollouts.Abort(rollout_pb2.AbortRequest(all=True), timeout=60)
            for live in self.live:
                assert (await live.generation.all()).reason == "ABORTED"
            await self.api.idle()
            if (await self.api.info()).state != common_pb2.SERVER_STATE_SERVING:
                await publish(self.api, await random_weights(self.api, 0))
            await self.channel.close()

        self.run(leave())
        self.runner.close()

    @rule(target=pauses)
    def pause(self) -> str:
        answer = self.run(self.api.pause(uuid.uuid4().hex))
        self.held.add(answer.pause_id)
        assert answer.held_sequences == len(self.live)
        return answer.pause_id

    @rule(pause_id=pauses)
    def resume(self, pause_id: str) -> None:
        self.held.discard(pause_id)
        assert self.run(self.api.resume(pause_id)).remaining_pauses == len(self.held)

    @precondition(lambda self: self.mode == "SERVING")
    @rule(bound=st.booleans())
    def start(self, *, bound: bool) -> None:
        most = self.weights.version if bound and self.weights.HasField("version") else None
        request_id = uuid.uuid4().hex
        message = request((1, 2), LONG, request_id=request_id, max_weight_version=most)
        self.live.append(Live(request_id, Generation(self.api, message), most))
        count = len(self.live)

        async def arrived() -> None:
            await self.api.until(
                lambda info: (
                    info.running_sequences + info.waiting_sequences + info.held_sequences == count
                )
            )

        self.run(arrived())

    @precondition(lambda self: self.live and not self.held)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        output = live.generation.output
        self.run(live.generation.some(len(output.tokens) + 1))
        while output.tags[-1] != self.weights:  # what was sampled before a commit comes first
            self.run(live.generation.some(len(output.tokens) + 1))
        assert output.finish is None
        assert output.revisions == sorted(output.revisions)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), cut=st.booleans())
    def end(self, data: st.DataObject, *, cut: bool) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        if cut:
            live.generation.call.cancel()
            count = len(self.live)
            self.run(
                self.api.until(
                    lambda info: (
                        info.running_sequences + info.waiting_sequences + info.held_sequences
                        == count
                    )
                )
            )
            return
        assert self.run(self.api.abort(live.request_id)) == (1, [])
        assert self.run(live.generation.all()).reason == "ABORTED"

    @precondition(lambda self: self.staged is None and self.mode != "SLEEPING")
    @rule(seed=st.integers(0, 3), tagged=st.booleans())
    def stage(self, seed: int, *, tagged: bool) -> None:
        version = self.version if tagged else None
        tensors = self.run(random_weights(self.api, seed))
        self.staged = Update(self.api, tensors, version, term=next(TERMS))
        self.run(self.staged.stage())
        assert self.run(self.api.info()).weights == self.weights

    @precondition(lambda self: self.staged is not None)
    @rule(max_kv_lag=st.none() | st.integers(0, 2))
    def commit(self, max_kv_lag: int | None) -> None:
        change, self.staged = self.staged, None
        assert change is not None
        answer = self.run(change.commit(max_kv_lag=max_kv_lag))
        self.mode = "SERVING"
        untouched = change.version is None and answer.already_current
        assert answer.weights.revision == self.weights.revision + (0 if untouched else 1)
        self.weights = answer.weights
        self.version = max(self.version, answer.weights.version + 1)
        over = [live for live in self.live if live.bound is not None and change.version is not None]
        for live in over:
            self.live.remove(live)
            assert self.run(live.generation.all()).reason == "INTERRUPTED"

    @precondition(lambda self: self.staged is not None)
    @rule()
    def discard(self) -> None:
        change, self.staged = self.staged, None
        assert change is not None
        assert self.run(change.discard()).weights == self.weights
        assert self.refused(change.commit()) == "NOT_STAGED"

    @precondition(lambda self: self.mode == "SERVING")
    @rule(form=st.sampled_from(["KEEP", "HOST_BACKUP", "DISCARD"]))
    def sleep(self, form: str) -> None:
        weights = rollout_pb2.SleepingWeights.Value(f"SLEEPING_WEIGHTS_{form}")
        message = rollout_pb2.SleepRequest(weights=weights)
        self.run(self.api.rollouts.Sleep(message, timeout=60))
        self.mode, self.discarded = "SLEEPING", form == "DISCARD"
        for live in self.live:
            assert self.run(live.generation.all()).reason == "INTERRUPTED"
        self.live.clear()
        if self.staged is not None:  # it was dropped
            assert self.refused(self.staged.commit()) == "SLEEPING"
            self.staged = None

    @precondition(lambda self: self.mode == "SLEEPING")
    @rule(reload=st.booleans())
    def wake_up(self, *, reload: bool) -> None:
        message = rollout_pb2.WakeUpRequest(reload_checkpoint=reload)
        call = self.api.rollouts.WakeUp(message, timeout=60)
        if reload and not self.discarded:
            assert self.refused(call) == "BAD_REQUEST"
            return
        woken = self.run(call).weights
        if reload:
            assert woken.revision == self.weights.revision + 1
            self.weights = woken
        assert woken == self.weights
        self.mode = "AWAITING_WEIGHTS" if self.discarded and not reload else "SERVING"

    @precondition(lambda self: self.mode != "SERVING")
    @rule()
    def nothing_is_sampled(self) -> None:
        assert self.refused(generate(self.api, request())) == self.mode
        again = self.api.rollouts.Sleep(rollout_pb2.SleepRequest(), timeout=60)
        assert self.refused(again) == self.mode

    @precondition(lambda self: self.mode == "SLEEPING")
    @rule()
    def no_update_is_taken_asleep(self) -> None:
        update = Update(self.api, self.run(random_weights(self.api, 0)), term=next(TERMS))
        assert self.refused(update.announce()) == "SLEEPING"

    @precondition(lambda self: self.state == "SERVING")
    @rule(seed=st.integers(0, 2**64 - 1))
    def generate_one(self, seed: int) -> None:
        output = self.run(generate(self.api, request((9,), 3, seed=seed)))
        assert output.reason == "LENGTH"
        assert set(output.revisions) == {self.weights.revision}

    @invariant()
    def the_server_says_what_it_does(self) -> None:
        info = self.run(self.api.info())
        assert common_pb2.ServerState.Name(info.state) == f"SERVER_STATE_{self.state}"
        assert info.weights == self.weights
        running = info.running_sequences + info.waiting_sequences
        assert info.held_sequences == (len(self.live) if self.held else 0)
        assert running == (0 if self.held else len(self.live))


@pytest.mark.slow
def test_calls_in_any_order(server: ServerProcess) -> None:
    machine = type("Bound", (Machine,), {"address": server.address})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(60),
            stateful_step_count=16,
            suppress_health_check=list(HealthCheck),
        ),
    )
