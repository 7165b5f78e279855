"""Deltas in the SGLang engine: read and put in place where a model fuses what it loads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_server.engines.base import EngineError, NoMemoryError, StagedUpdate, TornWeightsError
from rollwire_server.engines.loading import tensor_in_place, trace_load
from rollwire_server.engines.sglang import loader
from rollwire_server.engines.sglang import weights as weights_module
from rollwire_server.engines.sglang.weights import BESIDE_DELTA, SglangWeights
from rollwire_transport import (
    ManifestError,
    PublishedCopy,
    ReceivedDelta,
    describe_all,
    plan,
    tensor_digests,
)
from safetensors.torch import save_file
from support.engines import staged_update
from support.sglang_weights import FACTS, Beside, Copying, Fragile, weights_of
from support.tensors import random_tensor
from torch import nn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from pathlib import Path

    from rollwire_server.engines.base import PreparedDelta
    from rollwire_transport import Delta
    from torch import Tensor

CPU = torch.device("cpu")
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
ROWS = 512


class Trainer:
    """Publishes the tensors of ``Copying``, which are zeros at first."""

    def __init__(self) -> None:
        self.copy = PublishedCopy(CPU)
        self.tensors = {name: torch.zeros(ROWS, 2) for name in ("good", "late")}
        self.digests: Mapping[str, int] = {}
        self.delta()

    def delta(self, **values: float) -> Delta:
        """What changes when one element of each of these tensors does."""
        for name, value in values.items():
            self.tensors[name][1, 0] = value
        manifest = plan(describe_all(self.tensors), bucket_bytes=1536)
        snapshot = self.copy.take(manifest, self.tensors.items, device=CPU)
        self.digests = snapshot.digests
        return snapshot.delta  # type: ignore[return-value]  # None the first time


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the model is."""
    return str(request.param)


@pytest.fixture
def model(device: str) -> Copying:
    return Copying(ROWS).to(device)


@pytest.fixture
async def weights(model: Copying, tmp_path: Path) -> AsyncIterator[SglangWeights]:
    async with weights_of(model, tmp_path) as weights:
        await weights.allocate_staging()
        yield weights


def whole(tensor: Tensor | Callable[[], Tensor]) -> Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else tensor()


async def prepared(weights: SglangWeights, delta: Delta) -> PreparedDelta:
    staged = await weights.stage_delta(delta.manifest)
    for name, tensor in delta.tensors.items():
        staged[name].copy_(whole(tensor))
    return await weights.prepare_delta(delta.manifest, staged, weights._digests)


async def commit(weights: SglangWeights, delta: PreparedDelta) -> None:
    await weights.apply(StagedUpdate({}, delta.digests, delta))


async def send_full(weights: SglangWeights, tensors: Mapping[str, Tensor]) -> None:
    staged = await weights.stage(weights.specs)
    for name, tensor in tensors.items():
        staged[name].copy_(tensor)
    await weights.apply(staged_update(staged))


async def test_a_delta_changes_what_it_says_and_nothing_before_its_commit(
    weights: SglangWeights, model: Copying, trainer: Trainer
) -> None:
    assert weights.takes_deltas
    for value in (1.0, 2.5):
        before = model.fused.clone()
        delta = await prepared(weights, trainer.delta(late=value))
        assert delta.digests == trainer.digests
        assert model.fused.equal(before)
        await commit(weights, delta)
        assert model.fused.nonzero().tolist() == [[ROWS + 1, 0]]
        assert model.fused[ROWS + 1, 0] == value
        assert await weights.digests() == trainer.digests
        model.fused.data[0, 0] = 1  # what is compared is the memory after the commit
        with pytest.raises(EngineError, match="have changed: fused"):
            await weights.digests()
        model.fused.data[0, 0] = 0


async def test_it_waits_in_the_memory_of_full_updates(
    weights: SglangWeights, model: Copying, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    obeyed: list[str] = []
    execute = weights._bridge.update

    async def noted(command: str, seconds: float) -> None:
        obeyed.append(json.loads(command)["do"])
        await execute(command, seconds)

    monkeypatch.setattr(weights._bridge, "update", noted)
    memory = loader._loaders[model]._memories[0]
    for value in (1.0, 2.0):
        await send_full(weights, trainer.tensors)
        await commit(weights, await prepared(weights, trainer.delta(good=value)))
        assert model.fused[1, 0] == value
    assert obeyed == ["apply", "prepare", "apply_delta"] * 2
    assert loader._loaders[model]._memories[0] is memory


async def test_on_another_base_it_leads_to_another_digest(
    weights: SglangWeights, model: Copying, trainer: Trainer
) -> None:
    delta = trainer.delta(good=1.0)
    model.fused.data[1, 0] = 7.0
    assert (await prepared(weights, delta)).digests != trainer.digests


@pytest.mark.parametrize("by", ["full update", "delta", "checkpoint", "closed memory"])
async def test_once_the_weights_have_changed_it_is_refused(
    weights: SglangWeights, model: Copying, trainer: Trainer, by: str
) -> None:
    first = await prepared(weights, trainer.delta(good=1.0))
    match by:
        case "full update":
            await send_full(weights, trainer.tensors)
        case "delta":
            await commit(weights, await prepared(weights, trainer.delta(good=3.0)))
        case "checkpoint":
            await weights.reload()
        case "closed memory":
            await weights.release_staging()
    before, digests = model.fused.clone(), await weights.digests()
    with pytest.raises(EngineError, match="have changed since the delta was prepared") as caught:
        await commit(weights, first)
    assert not isinstance(caught.value, TornWeightsError)
    assert weights.intact
    assert model.fused.equal(before)
    assert await weights.digests() == digests


async def test_it_does_not_mend_what_is_torn_or_discarded(
    weights: SglangWeights, trainer: Trainer
) -> None:
    delta = await prepared(weights, trainer.delta(good=1.0))
    weights.intact = False
    with pytest.raises(EngineError, match="send a full one"):
        await commit(weights, delta)
    del delta
    with pytest.raises(EngineError, match="send a full update"):
        await prepared(weights, trainer.delta(good=2.0))
    await send_full(weights, trainer.tensors)
    await commit(weights, await prepared(weights, trainer.delta(good=3.0)))
    assert await weights.digests() == trainer.digests


async def test_one_that_fails_half_way_leaves_torn_weights(
    weights: SglangWeights, model: Copying, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = await prepared(weights, trainer.delta(good=1.0))

    def fails(_: ReceivedDelta) -> None:
        raise RuntimeError("an illegal access")

    with monkeypatch.context() as patch:
        patch.setattr(ReceivedDelta, "apply", fails)
        with pytest.raises(TornWeightsError, match="an illegal access"):
            await commit(weights, delta)
    assert not weights.intact
    await send_full(weights, trainer.tensors)
    assert weights.intact


async def test_what_is_no_delta_is_refused(weights: SglangWeights, trainer: Trainer) -> None:
    delta = trainer.delta(good=1.0)
    staged = await weights.stage_delta(delta.manifest)
    for tensor in staged.values():
        tensor.fill_(7)
    with pytest.raises(ManifestError, match="not the delta of a bucket"):
        await weights.prepare_delta(delta.manifest, staged, weights._digests)


async def test_without_memory_for_it_the_weights_serve_on(
    weights: SglangWeights, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> dict[str, int]:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(ReceivedDelta, "digests", fails)
        with pytest.raises(NoMemoryError, match="tried to allocate"):
            await prepared(weights, trainer.delta(good=1.0))
    assert weights.intact


async def test_one_that_leaves_too_little_memory_for_steps_is_refused_before_it_is_sent(
    weights: SglangWeights, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = BESIDE_DELTA
    monkeypatch.setattr(weights_module, "free_memory", lambda _: free)
    monkeypatch.setattr(weights, "_device", torch.device("cuda"))
    delta = trainer.delta(good=1.0)
    with pytest.raises(NoMemoryError, match="publish in full"):
        await weights.stage_delta(delta.manifest)
    free += 5 * delta.nbytes
    await weights.stage_delta(delta.manifest)
    free = BESIDE_DELTA  # what SGLang's process has taken, it takes for the next one
    await weights.stage_delta(delta.manifest)


class Fusing(nn.Module):
    """Loads "qkv" in three copies, "experts.0" and "experts.1" into one parameter, "embed" into the
    beginning of a padded one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(80, 3, dtype=torch.bfloat16))
        self.experts = nn.Parameter(torch.zeros(2, 99, dtype=torch.bfloat16))
        self.embed = nn.Parameter(torch.zeros(80, 3, dtype=torch.bfloat16))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "qkv":
                for begin, size in ((0, 40), (60, 20), (40, 20)):
                    self.qkv.data.narrow(0, begin, size).copy_(tensor.narrow(0, begin, size))
            elif name == "embed":
                self.embed.data[:70].copy_(tensor)
                self.embed.data[70:].fill_(0)
            else:
                self.experts.data[int(name[-1])].copy_(tensor)


FUSED = {"qkv": (80, 3), "embed": (70, 3), "experts.0": (99,), "experts.1": (99,)}


def test_deltas_reach_what_lies_fused_in_one_piece(device: str) -> None:
    model, seed = Fusing().to(device), torch.Generator().manual_seed(1)
    tensors = {n: torch.randn(s, generator=seed).bfloat16() for n, s in FUSED.items()}
    specs = describe_all(tensors)
    copies = trace_load(model, [(s.name, s.dtype, s.shape) for s in specs])
    in_place = {spec.name: tensor_in_place(copies[spec.name], spec) for spec in specs}
    copy = PublishedCopy(CPU)
    copy.take(plan(specs), tensors.items, device=CPU)
    model.load_weights(tensors.items())
    before = tensor_digests(specs, tensors)
    for tensor in tensors.values():
        tensor.view(-1)[1::30] += 1
    snapshot = copy.take(plan(specs, bucket_bytes=320), tensors.items, device=CPU)
    assert snapshot.delta is not None
    deltas = {name: whole(tensor).to(device) for name, tensor in snapshot.delta.tensors.items()}
    received = ReceivedDelta(snapshot.delta.manifest, deltas, in_place)  # type: ignore[arg-type]
    assert received.digests(before) == snapshot.digests
    with torch.no_grad():
        received.apply()
    other = Fusing().to(device)
    other.load_weights(tensors.items())
    assert all(map(torch.equal, model.parameters(), other.parameters()))


class Elsewhere(nn.Module):
    """Loads "rows", and another tensor in the way of its name."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(64, 64))
        self.kept = nn.Parameter(torch.zeros(64, 64))
        self.other = nn.Parameter(torch.zeros(64, 64))
        self.wider = nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
        self.narrower = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            match name:
                case "rows":
                    self.rows.data.copy_(tensor)
                case "transposed":
                    self.kept.data.copy_(tensor.t())
                case "with padded rows":
                    self.wider.data.view(torch.float32)[:, :64].copy_(tensor)
                case "twice":
                    self.kept.data.copy_(tensor)
                    self.other.data.copy_(tensor)
                case "in two places":
                    self.kept.data[:20].copy_(tensor[:20])
                    self.other.data[20:].copy_(tensor[20:])
                case "in another order":
                    self.kept.data[32:].copy_(tensor[:32])
                    self.kept.data[:32].copy_(tensor[32:])
                case "in a wider dtype":
                    self.wider.data.copy_(tensor)
                case "in a narrower dtype":
                    self.narrower.data.copy_(tensor)
                case "rows of a shard":
                    self.kept.data[:32].copy_(tensor[32:])
                case "columns of a shard":
                    self.kept.data[:, :32].copy_(tensor[:, 32:])
                case "one for all":
                    self.kept.data.copy_(tensor[0, 0])


def checkpoint_of(*names: str) -> dict[str, Tensor]:
    return {name: random_tensor(torch.float32, (64, 64), i) for i, name in enumerate(names)}


def serving(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> SglangWeights:
    """Weights that a model has loaded from a checkpoint."""
    (folder / "config.json").write_text("{}")
    save_file(dict(tensors), folder / "m.safetensors")
    model.load_weights(tensors.items())  # type: ignore[operator]
    return SglangWeights(Beside(model), FACTS, folder, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "transposed",
        "with padded rows",
        "twice",
        "in two places",
        "in another order",
        "in a wider dtype",
    ],
)
async def test_a_tensor_that_lies_otherwise_is_read_back_for_a_delta(
    name: str, device: str, tmp_path: Path
) -> None:
    tensors = checkpoint_of("rows", name)
    for tensor in tensors.values():
        tensor.nan_to_num_()
    model, expected = Elsewhere().to(device), Elsewhere().to(device)
    weights = serving(model, tensors, tmp_path)
    await weights.read()
    assert weights.takes_deltas
    copy = PublishedCopy(CPU)
    manifest = plan(describe_all(tensors))
    copy.take(manifest, tensors.items, device=CPU)
    for _ in range(2):
        for tensor in tensors.values():
            tensor.view(-1)[5::50] += 1
        snapshot = copy.take(manifest, tensors.items, device=CPU)
        assert snapshot.delta is not None
        delta = await prepared(weights, snapshot.delta)
        assert delta.digests == snapshot.digests
        await commit(weights, delta)
        expected.load_weights(tensors.items())
        assert all(map(torch.equal, model.parameters(), expected.parameters()))
        del delta


@pytest.mark.parametrize(
    "name",
    [
        "in a narrower dtype",
        "rows of a shard",
        "columns of a shard",
        "one for all",
        "not at all",
        "too large to be read back",
    ],
)
async def test_deltas_are_not_taken_where_they_cannot_reach_a_tensor(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = checkpoint_of("rows", name)
    if name == "too large to be read back":
        monkeypatch.setattr(loader, "GATHERED_BYTES", 64 * 64 * 4 - 1)
        tensors = checkpoint_of("rows", "transposed")
    weights = serving(Elsewhere(), tensors, tmp_path)
    with caplog.at_level("INFO"):
        await weights.read()
    assert not weights.takes_deltas
    assert f"does not hold {[*tensors][-1]} as it is sent" in caplog.text


@pytest.mark.parametrize("model", [Fragile(ROWS)])
async def test_without_a_plan_there_are_no_deltas(weights: SglangWeights) -> None:
    assert not weights.takes_deltas


class Deriving(Copying):
    """Keeps a sum of its parameter, by the version of that, as some of SGLang's layers do."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.kept: tuple[int, float] = (-1, 0.0)

    def total(self) -> float:
        if self.kept[0] != self.fused._version:
            self.kept = (self.fused._version, self.fused.sum().item())
        return self.kept[1]


@pytest.mark.parametrize("model", [Deriving()])
async def test_what_is_derived_from_weights_by_their_version_follows_them(
    weights: SglangWeights, model: Deriving, trainer: Trainer
) -> None:
    assert model.total() == 0
    await commit(weights, await prepared(weights, trainer.delta(good=1.0)))
    assert model.total() == 1
    trainer.tensors["late"][0, 0] = 2
    await send_full(weights, trainer.tensors)
    assert model.total() == 3
