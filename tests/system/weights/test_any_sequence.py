"""Publishes of any kind, one after the other, against a model of what servers hold (Hypothesis)."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import rollwire_transport as transport
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rollwire.v1 import common_pb2, rollout_pb2
from rollwire_client import KvPolicy, RollwireError, StalePublisherError
from rollwire_server import builtin_model
from support import reference
from support.calls import Api, Generation, Output, connected, generate, request
from support.examples import examples
from support.fleets import publisher, shared_servers
from support.giving import DTYPES, HEAD, SOURCES, TIED, Giving
from support.publishing import no_update, status

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from rollwire_client import Fleet, Publisher, PublishReport
    from support.fleets import RestartableServers
    from torch import Tensor

    Tensors = dict[str, Tensor]

SECONDS = 120
PROMPT, SHORT, LONG = (7, 8, 9), 8, 1500
NEAR_TIE = 1e-3  # between logits, which engines add in other orders


@dataclass(frozen=True)
class Served:
    version: int | None
    digest: int

    @classmethod
    def of(cls, tag: common_pb2.WeightTag) -> Served:
        return cls(tag.version if tag.HasField("version") else None, tag.digest)


class Machine(RuleBasedStateMachine):
    """A fleet of two servers, which every example takes over as the last one left them."""

    servers: RestartableServers

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = contextlib.AsyncExitStack()
        self.apis: dict[str, Api] = {}
        self.model = builtin_model("builtin:tiny")
        named = self.model.state_dict().items()
        self.specs = [transport.describe(name, tensor) for name, tensor in named if name != HEAD]
        self.sent: dict[int, Tensors] = {}  # every policy, by its digest
        self.holds: dict[str, Served | None] = {}  # by address; None awaits weights
        self.policy: Served | None = None  # of the fleet; None after a publish was cancelled
        self.asleep: set[str] = set()
        self.paused: set[str] = set()
        self.long: dict[str, Generation] = {}

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(SECONDS):
                return await work

        return self.runner.run(bounded())

    def teardown(self) -> None:
        async def leave() -> None:
            for generation in self.long.values():
                generation.call.cancel()
            for api in self.apis.values():
                await api.resume()
                await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
            await self.stack.aclose()

        self.run(leave())
        self.runner.close()

    @initialize(seed=st.integers(0, 99), full_every=st.sampled_from([None, 1, 3]))
    def start(self, seed: int, full_every: int | None) -> None:
        self.full_every = full_every
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            spec.name: torch.randn(spec.shape, generator=generator) * 0.1 for spec in self.specs
        }

        async def take_over() -> None:
            self.fleet: Fleet = await self.stack.enter_async_context(self.servers.fleet())
            for address in self.servers.addresses:
                await self.connect(address)
            self.trainer: Publisher = publisher(self.fleet, full_every=full_every)
            await self.publish_all()

        self.run(take_over())

    async def connect(self, address: str) -> None:
        self.apis[address] = await self.stack.enter_async_context(connected(address))

    def remember(self, tensors: Tensors) -> int:
        digest = transport.sum_digests(transport.tensor_digests(self.specs, tensors).values())
        self.sent[digest] = {name: tensor.clone() for name, tensor in tensors.items()}
        return digest

    @property
    def awake(self) -> list[str]:
        return [address for address in self.servers.addresses if address not in self.asleep]

    @property
    def sampling(self) -> list[str]:
        return [a for a in self.awake if a not in self.paused and self.holds[a] is not None]

    # Publishes.

    def learn(self, seed: int, share: float, *, in_place: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.tensors.items():
            changes = torch.rand(tensor.shape, generator=generator) < share
            noise = torch.randn(tensor.shape, generator=generator) * 0.1
            new = torch.where(changes, noise, tensor)
            if in_place:
                tensor.copy_(new)
            else:
                self.tensors[name] = new

    async def publish_all(self) -> None:
        expected = Served(self.servers.next_version(), self.remember(self.tensors))
        report = await self.trainer.publish_and_wait(
            expected.version, self.tensors, allow_version_rollback=True, require="any"
        )
        self.took(report, self.awake, expected)

    def took(self, report: PublishReport, takers: list[str], expected: Served) -> None:
        took = {s.address: s.weights for s in report.servers if s.weights is not None}
        assert sorted(took) == sorted(takers), report.failed
        for address, tag in took.items():
            assert (tag.version, tag.digest) == (expected.version, expected.digest)
            self.holds[address] = expected
        self.policy = expected

    @rule(
        giving=st.builds(
            Giving,
            source=st.sampled_from(SOURCES),
            tied=st.sampled_from(TIED),
            dtype=st.sampled_from(DTYPES),
            partial=st.booleans(),
            shuffled=st.booleans(),
            seed=st.integers(0, 99),
        ),
        share=st.sampled_from([0.0, 1e-4, 0.01, 0.2, 1.0]),
        in_place=st.booleans(),
        numbering=st.sampled_from(["next", "none", "same", "lower"]),
        max_kv_lag=st.sampled_from([None, 0, 1]),
        spoil=st.booleans(),
    )
    def publish(
        self,
        giving: Giving,
        share: float,
        in_place: bool,
        numbering: str,
        max_kv_lag: int | None,
        spoil: bool,
    ) -> None:
        self.learn(giving.seed, share, in_place=in_place)
        if giving.partial and self.policy is None:
            return
        given, values = giving.give(self.tensors)
        takers = self.awake
        if giving.partial and self.policy is not None:
            values = {**self.sent[self.policy.digest], **values}
            takers = [address for address in takers if self.holds[address] == self.policy]
        expected = Served(self.number(numbering), self.remember(values))

        async def work() -> PublishReport:
            handle = await self.trainer.publish(
                expected.version,
                given,
                partial=giving.partial,
                allow_version_rollback=numbering in {"same", "lower"},
                kv_policy=KvPolicy.RECOMPUTE if max_kv_lag == 0 else KvPolicy.KEEP,
                max_kv_lag=max_kv_lag or None,
            )
            await handle.released
            if spoil:
                for tensor in self.tensors.values():
                    tensor.zero_()
            return await handle.committed

        if takers:
            self.took(self.run(work()), takers, expected)
        else:
            with pytest.raises(RollwireError):
                self.run(work())
        self.tensors = values

    def number(self, numbering: str) -> int | None:
        last = None if self.policy is None else self.policy.version
        if numbering == "none":
            return None
        if last is None or numbering == "next":
            return self.servers.next_version()
        return last if numbering == "same" else last // 2

    @rule(seed=st.integers(0, 99), seconds=st.floats(0, 0.12))
    def cancel_a_publish(self, seed: int, seconds: float) -> None:
        """At any point. Each server holds the one policy or the other."""
        self.learn(seed, 0.1, in_place=True)
        expected = Served(self.servers.next_version(), self.remember(self.tensors))

        async def work() -> None:
            publish = asyncio.create_task(
                self.trainer.publish_and_wait(expected.version, self.tensors)
            )
            await asyncio.wait([publish], timeout=seconds)
            publish.cancel()
            with contextlib.suppress(asyncio.CancelledError, RollwireError):
                await publish
            for tensor in self.tensors.values():
                tensor.add_(0.5)
            for address in self.awake:
                await no_update(self.apis[address])
                if Served.of((await status(self.apis[address])).weights) == expected:
                    self.holds[address] = expected

        self.run(work())
        self.policy = None

    @precondition(lambda self: self.policy is not None)
    @rule(source=st.sampled_from(SOURCES), first_others=st.booleans())
    def catch_up(self, source: str, first_others: bool) -> None:
        assert self.policy is not None
        right = self.sent[self.policy.digest]
        behind = [address for address in self.awake if self.holds[address] != self.policy]
        if first_others and behind:
            others = {name: tensor + 1 for name, tensor in right.items()}
            with pytest.raises(RollwireError, match="not those of"):
                self.run(self.trainer.catch_up(others))
        given, _ = Giving(source, shuffled=True).give(right)
        self.took(self.run(self.trainer.catch_up(given)), behind, self.policy)

    @rule()
    def another_publisher_takes_over(self) -> None:
        if self.asleep:
            return
        before, self.trainer = self.trainer, publisher(self.fleet, full_every=self.full_every)
        self.run(self.publish_all())
        with pytest.raises(StalePublisherError):
            self.run(before.publish_and_wait(self.servers.next_version(), self.tensors))

    # Servers.

    @rule(which=st.integers(0, 1))
    def kill(self, which: int) -> None:
        server = self.servers.all[which]
        if (generation := self.long.pop(server.address, None)) is not None:
            generation.call.cancel()
        server.kill()
        self.servers.restart(server)
        self.asleep.discard(server.address)
        self.paused.discard(server.address)
        self.holds[server.address] = None
        self.run(self.connect(server.address))
        self.run(self.probe(server.address))

    async def probe(self, address: str) -> None:
        (handle,) = (handle for handle in self.fleet._pool.listed if handle.address == address)
        now = (await self.apis[address].info()).weights.server_id
        while handle.info is None or handle.info.weights.server_id != now:
            await handle.probe()
        await handle.probe()

    @rule(which=st.integers(0, 1), form=st.sampled_from(["KEEP", "HOST_BACKUP", "DISCARD"]))
    def sleep(self, which: int, form: str) -> None:
        address = self.servers.addresses[which]
        if address in self.asleep or self.holds[address] is None:
            return
        weights = rollout_pb2.SleepingWeights.Value(f"SLEEPING_WEIGHTS_{form}")
        message = rollout_pb2.SleepRequest(weights=weights)
        self.run(self.apis[address].rollouts.Sleep(message, timeout=60))
        self.long.pop(address, None)
        self.asleep.add(address)
        if form == "DISCARD":
            self.holds[address] = None

    @rule()
    def wake_up(self) -> None:
        async def work(address: str) -> None:
            await self.apis[address].rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
            await self.probe(address)

        for address in sorted(self.asleep):
            self.run(work(address))
        self.asleep.clear()

    @rule(which=st.integers(0, 1))
    def pause(self, which: int) -> None:
        address = self.servers.addresses[which]
        if address not in self.asleep | self.paused:
            self.run(self.apis[address].pause())
            self.paused.add(address)

    @rule()
    def resume(self) -> None:
        for address in sorted(self.paused):
            self.run(self.apis[address].resume())
        self.paused.clear()

    # What they sample.

    @rule(which=st.integers(0, 1))
    def begin(self, which: int) -> None:
        address = self.servers.addresses[which]
        if address in self.sampling and address not in self.long:
            message = request(PROMPT, LONG, temperature=0.0, ignore_eos=True)
            self.long[address] = Generation(self.apis[address], message)
            self.run(self.long[address].some())

    @rule()
    def follow(self) -> None:
        """What began under an earlier policy goes on under this one."""

        async def read(address: str) -> Output:
            generation, now = self.long[address], (await self.apis[address].info()).weights
            output = await generation.some()
            while output.finish is None and output.tags[-1] != now:
                await generation.some(len(output.tokens) + 1)
            return output

        for address in [address for address in self.sampling if address in self.long]:
            output = self.run(read(address))
            self.explain(PROMPT, output)
            if output.finish is not None:
                del self.long[address]

    def explain(self, prompt: tuple[int, ...], output: Output) -> None:
        """Each token that read no older keys is the likeliest of the policy that its tag names."""
        for digest in {tag.digest for tag in output.tags}:
            model = reference.with_tensors(self.model, self.sent[digest])
            logits = reference.logits(model, [*prompt, *output.tokens])[len(prompt) - 1 :]
            for row, token, tag, oldest in zip(
                logits, output.tokens, output.tags, output.oldest, strict=False
            ):
                if tag.digest == digest and tag.revision == oldest:
                    assert row[token] >= row.max() - NEAR_TIE

    @invariant()
    def servers_hold_what_was_published(self) -> None:
        for address in self.awake:
            if self.holds[address] is not None:
                self.run(self.check(address))

    async def check(self, address: str) -> None:
        api = self.apis[address]
        told = await status(api, verify=True)
        assert told.intact
        assert not told.update_id
        assert Served.of(told.weights) == self.holds[address]
        if address in self.sampling:
            prompt = (1, 2, 3)
            output = await generate(api, request(prompt, SHORT, temperature=0.0, ignore_eos=True))
            assert all(tag == told.weights for tag in output.tags)
            assert output.oldest == [told.weights.revision] * SHORT
            self.explain(prompt, output)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableServers]:
    with shared_servers(tmp_path_factory.mktemp("any"), 2) as two:
        yield two


@pytest.mark.slow
def test_publishes_of_any_kind_one_after_the_other(two: RestartableServers) -> None:
    machine = type("Bound", (Machine,), {"servers": two})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(8),
            stateful_step_count=20,
            phases=[Phase.generate],  # what depends on time cannot be shrunk
            suppress_health_check=list(HealthCheck),
        ),
    )
