"""Tensors that change while they are sent: nothing of them is committed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from client.publishing import TIMEOUTS, holds, publish, publishing
from client.scripted import until
from client.scripted_weights import policy
from rollwire_client import TensorsChangedError
from rollwire_client._publishing.tensors import ChangeDetector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rollwire_client._publishing.tensors import TensorSource
    from torch import Tensor


def parameters() -> dict[str, Tensor]:
    """A policy to learn with, the alias left out."""
    return {
        name: torch.nn.Parameter(tensor)
        for name, tensor in policy().items()
        if name != "head.weight"
    }


def optimizer(tensors: Mapping[str, Tensor], **options: bool) -> torch.optim.Optimizer:
    for parameter in tensors.values():
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(tensors.values(), lr=0.1, **options)


GIVEN: dict[str, Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | TensorSource]] = {
    "parameters": lambda tensors: tensors,
    "a state dict": lambda tensors: {n: t.detach() for n, t in tensors.items()},
    "a view of one memory": lambda tensors: {n: t.view_as(t) for n, t in tensors.items()},
    "a callable": lambda tensors: lambda: iter(tensors.items()),
    "a callable that detaches": lambda given: lambda: ((n, t.detach()) for n, t in given.items()),
    "functions": lambda tensors: lambda: ((n, lambda t=t: t.detach()) for n, t in tensors.items()),
}  # fmt: skip


@pytest.mark.parametrize(
    ("give", "options"),
    [
        # Each way to give tensors, and each kind of optimizer, is tried fast; the rest is slow.
        pytest.param(
            give, options, id=f"{name}-{options}",
            marks=[pytest.mark.slow] if options and number else [],
        )
        for number, (name, give) in enumerate(GIVEN.items())
        for options in ({}, {"foreach": False}, {"fused": True})
    ],
)  # fmt: skip
async def test_an_optimizer_s_step_before_the_release_ends_the_publish(
    give: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | TensorSource],
    options: dict[str, bool],
) -> None:
    tensors = parameters()
    learner, source = optimizer(tensors, **options), give(tensors)

    def stepping() -> Iterator[tuple[str, object]]:
        for number, item in enumerate(source()):
            if number == 1:
                learner.step()
            yield item

    async with publishing(2) as (servers, _, publisher):
        handle = await publisher.publish(1, stepping if callable(source) else source)
        if not callable(source):
            learner.step()
        told = r"embed\.weight.* changed in place while being sent; nothing was committed, the "
        with pytest.raises(TensorsChangedError, match=f"{told}servers keep the weights"):
            await handle.released
        with pytest.raises(TensorsChangedError, match="await the handle's `released` before"):
            await handle.committed
        await until(lambda: all(handle.update_id in server.discards for server in servers))
        assert [server.commits for server in servers] == [[], []]
        report = await (await publisher.publish(1, tensors)).committed
        assert report.failed == ()
        for server in servers:
            assert all(torch.equal(server.committed[n], t) for n, t in tensors.items())


async def test_a_change_between_two_groups_is_noticed() -> None:
    tensors = policy()
    passes = 0

    def source() -> Iterator[tuple[str, Tensor]]:
        nonlocal passes
        passes += 1
        if passes == 2:  # it is sent again, from where the link broke
            tensors["layer.weight"].neg_()
        yield from ((name, tensors[name]) for name in tensors if name != "head.weight")

    async with publishing(2, TIMEOUTS) as (servers, _, publisher):
        servers[1].stop_receiving_at = 6
        handle = await publisher.publish(1, source)
        with pytest.raises(TensorsChangedError, match=r"^layer\.weight changed in place"):
            await handle.committed
        assert passes == 2
        assert [server.commits for server in servers] == [[], []]


async def test_only_what_has_changed_is_named() -> None:
    tensors = policy()
    async with publishing(1) as (_, _, publisher):
        handle = await publisher.publish(1, tensors)
        tensors["layer.bias"][2:4] = 0  # through a view
        with pytest.raises(TensorsChangedError, match=r"^layer\.bias changed in place"):
            await handle.committed


async def test_after_the_release_tensors_may_change() -> None:
    tensors = policy()
    async with publishing(1) as (servers, _, publisher):
        handle = await publisher.publish(1, tensors)
        await handle.released
        for tensor in tensors.values():
            tensor.zero_()
        assert (await handle.committed).failed == ()
        assert holds(servers[0])


async def test_another_model_s_optimizer_is_nobody_s_business() -> None:
    async with publishing(1) as (servers, _, publisher):
        handle = await publisher.publish(1, policy())
        for fused in (False, True):
            optimizer(parameters(), fused=fused).step()
        assert (await handle.committed).failed == ()
        assert holds(servers[0])


@pytest.mark.parametrize("fused", [False, True])
async def test_a_step_that_leaves_the_policy_as_it_is_ends_nothing(*, fused: bool) -> None:
    """As where a critic warms up in the policy's optimizer."""
    tensors, critic = parameters(), torch.nn.Parameter(torch.ones(3))
    learner = optimizer({**tensors, "critic": critic}, fused=fused)
    for parameter in tensors.values():
        parameter.grad = None
    async with publishing(1) as (servers, _, publisher):
        handle = await publisher.publish(1, tensors)
        learner.step()
        assert (await handle.committed).failed == ()
        assert holds(servers[0])
    assert critic.max() < 1


def test_memory_that_was_given_back_is_another_tensor_s() -> None:
    detector, size = ChangeDetector(), 1 << 16
    for name, _ in detector.watch_source(lambda: ((f"w{i}", torch.ones(size)) for i in range(3)))():
        assert name
    others = {str(i): torch.nn.Parameter(torch.ones(size)) for i in range(3)}  # likely there
    with detector:
        optimizer(others).step()
        detector.check()


async def test_a_dict_that_gets_other_tensors_is_sent_as_it_was_given() -> None:
    tensors = policy()
    async with publishing(1) as (servers, _, publisher):
        handle = await publisher.publish(1, tensors)
        for name in tensors:
            tensors[name] = torch.zeros(1)
        assert (await handle.committed).failed == ()
        assert holds(servers[0])


async def test_tensors_without_a_counter_can_be_published() -> None:
    with torch.inference_mode():
        tensors = policy()
    for source in (tensors, lambda: ((n, t) for n, t in tensors.items() if n != "head.weight")):
        async with publishing(1) as (servers, _, publisher):
            assert (await (await publisher.publish(1, source)).committed).failed == ()
            assert holds(servers[0])


async def test_a_source_that_changes_what_it_gave_is_noticed_when_it_is_caught_up_with() -> None:
    async with publishing(2) as (servers, fleet, publisher):
        tensors = policy()
        servers[0].refuse_commit = True
        await (await publisher.publish(1, tensors)).committed
        servers[0].refuse_commit = False

        def source() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors.items():
                if name != "head.weight":
                    yield name, tensor
                    tensor.neg_()
                    tensor.neg_()  # which the digest does not show

        assert [member.address for member in await fleet._pool.outdated_servers()] == [
            servers[0].address
        ]
        with pytest.raises(TensorsChangedError):
            await publisher.catch_up(source)
        assert servers[0].commits == []
        await publish(publisher, 2)


def test_what_is_noted_is_not_kept() -> None:
    detector = ChangeDetector()
    tensor = torch.ones(8)
    memory = weakref.ref(tensor.untyped_storage())
    detector.watch("a", tensor)
    del tensor
    assert memory() is None
    detector.check()


def write_whole(tensor: Tensor) -> None:
    tensor.add_(1)


def write_shard(tensor: Tensor) -> None:
    tensor.to_local().add_(1)


@pytest.mark.parametrize(
    "change",
    [
        write_whole,
        write_shard,
        lambda tensor: optimizer({"a": tensor}).step(),
        lambda tensor: optimizer({"a": tensor}, fused=True).step(),
    ],
    ids=["whole", "shard", "optimizer", "fused optimizer"],
)
def test_dtensors_are_watched(change: Callable[[Tensor], object]) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        # A detached one's shard has a counter of its own.
        for given in [parameter, parameter.detach()][: 1 if change is write_shard else 2]:
            with ChangeDetector() as detector:
                detector.watch("a", given)
                detector.check()
                with torch.no_grad():
                    change(parameter)
                with pytest.raises(TensorsChangedError, match=r"^a changed"):
                    detector.check()
    finally:
        dist.destroy_process_group()
