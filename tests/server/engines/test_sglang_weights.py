"""The SGLang engine's weights: staged, put in place, compared; with the loader in this process."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire.types import SleepingWeights
from rollwire_server.engines.base import ChangedWeightsError, EngineError, TornWeightsError
from rollwire_server.engines.loading import UntraceableLoadError, grouped_copy, trace_load
from rollwire_server.engines.memory import allocate_on_host
from rollwire_server.engines.sglang import loader
from rollwire_server.engines.sglang.launch import unsupported_sleep
from rollwire_server.engines.sglang.processes import MemoryFile
from rollwire_server.engines.sglang.weights import SglangWeights, describe_checkpoint
from rollwire_transport import TensorSpec
from support.contract import flags
from support.engines import staged_update
from support.sglang_weights import Copying, Fragile, weights_of
from torch import nn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from rollwire_server.engines.memory import StagedTensors
    from torch import Tensor


class TestWeights:
    """Of a model that fuses "good" and "late" into one parameter."""

    @pytest.fixture
    def model(self) -> Copying:
        return Copying()

    @pytest.fixture
    async def weights(self, model: Copying, tmp_path: Path) -> AsyncIterator[SglangWeights]:
        async with weights_of(model, tmp_path) as weights:
            yield weights

    def staged(self, value: float, *names: str) -> StagedTensors:
        specs = [TensorSpec(name, "float32", (2, 2)) for name in names]
        staged = allocate_on_host(specs).lend(specs)
        for tensor in staged.values():
            tensor.fill_(value)
        return staged

    @pytest.mark.parametrize("model", [Copying(), Fragile()])
    async def test_the_digests_are_those_of_what_was_put(
        self, weights: SglangWeights, model: Copying
    ) -> None:
        before = await weights.digests()
        await weights.apply(staged_update(self.staged(1, "good")))
        assert model.fused.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
        after = await weights.digests()
        assert after["late"] == before["late"]
        assert after["good"] != before["good"]
        await weights.reload()
        assert await weights.digests() == before

    async def test_what_is_not_open_any_more_is_not_taken_for_put_in_place(
        self, weights: SglangWeights
    ) -> None:
        before = await weights.digests()
        staged = await weights.stage(weights.specs)
        await weights._command("close")
        with pytest.raises(EngineError, match="no staged memory is open"):
            await weights.apply(staged_update(staged))
        assert weights.intact
        assert await weights.digests() == before

    async def test_the_processes_open_memory_once_and_each_layout_anew(
        self, weights: SglangWeights, model: Copying, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        obeyed: list[str] = []
        execute = weights._bridge.update

        async def noted(command: str, seconds: float) -> None:
            obeyed.append(json.loads(command)["do"])
            await execute(command, seconds)

        monkeypatch.setattr(weights._bridge, "update", noted)
        await weights.allocate_staging()
        memory = loader._loaders[model]._memories[0]
        good, late = weights.specs
        for value, specs in enumerate([[good, late], [good, late], [late], [good, late]], start=1):
            staged = await weights.stage(specs)
            for tensor in staged.values():
                tensor.fill_(value)
            await weights.apply(staged_update(staged))
            del staged, tensor
            assert model.fused[2:].eq(value).all()
            assert loader._loaders[model]._memories[0] is memory
        assert obeyed == ["open", "apply", "apply", "open", "apply", "open", "apply"]
        assert model.fused[:2].eq(4).all()

    async def test_memory_that_a_transfer_may_still_write_to_is_not_used_again(
        self, weights: SglangWeights, model: Copying
    ) -> None:
        await weights.allocate_staging()
        late = (await weights.stage(weights.specs))["good"]  # all that is left of an update
        staged = await weights.stage(weights.specs)
        for tensor in staged.values():
            tensor.fill_(1)
        late.fill_(7)
        await weights.apply(staged_update(staged))
        assert model.fused.eq(1).all()

    async def test_memory_that_is_let_go_of_is_closed_everywhere(
        self, weights: SglangWeights, model: Copying
    ) -> None:
        await weights.allocate_staging()
        path = (await weights.stage(weights.specs)).layout.parts[0]["path"]
        there = Path(path).exists
        assert there()
        await weights.release_staging()
        assert not there()
        assert not loader._loaders[model]._memories
        with pytest.raises(EngineError, match="no staged memory is open"):
            await weights._command("apply")

    async def test_what_a_failed_command_opened_is_opened_again(
        self, weights: SglangWeights, model: Copying, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await weights.allocate_staging()
        execute = weights._bridge.update

        async def without_an_answer(command: str, seconds: float) -> None:
            await execute(command, seconds)
            raise EngineError("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(weights._bridge, "update", without_an_answer)
            with pytest.raises(EngineError, match="no answer"):
                await weights.stage(weights.specs[:1])
        staged = await weights.stage(weights.specs)
        for tensor in staged.values():
            tensor.fill_(3)
        await weights.apply(staged_update(staged))
        assert model.fused.eq(3).all()

    async def test_memory_that_changes_by_itself_is_noticed(
        self, weights: SglangWeights, model: Copying
    ) -> None:
        await weights.apply(staged_update(self.staged(1, "good", "late")))
        model.fused.data[3, 1] += 1e-6
        with pytest.raises(ChangedWeightsError, match="have changed: fused"):
            await weights.digests()

    async def test_memory_that_nobody_compares_has_not_changed(
        self, weights: SglangWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def dead(command: str, seconds: float) -> None:
            raise EngineError("SGLang is dead")

        monkeypatch.setattr(weights._bridge, "update", dead)
        with pytest.raises(EngineError, match="could not execute: SGLang is dead") as caught:
            await weights.digests()
        assert not isinstance(caught.value, ChangedWeightsError)

    @pytest.mark.parametrize("model", [Fragile()])
    async def test_what_fails_half_way_is_torn_until_a_full_update(
        self, weights: SglangWeights, model: Fragile
    ) -> None:
        model.fails_at = "late"
        with pytest.raises(TornWeightsError, match="late"):
            await weights.apply(staged_update(self.staged(2, "good", "late")))
        assert model.fused.tolist() == [[2, 2], [2, 2], [0, 0], [0, 0]]
        assert not weights.intact
        model.fails_at = ""
        with pytest.raises(EngineError, match="lacks 1 of 2"):
            await weights.apply(staged_update(self.staged(3, "good")))
        await weights.apply(staged_update(self.staged(3, "good", "late")))
        assert weights.intact
        assert model.fused.eq(3).all()

    async def test_what_fails_before_anything_is_touched_leaves_all_as_it_was(
        self, weights: SglangWeights, model: Fragile
    ) -> None:
        before = await weights.digests()
        gone = self.staged(4, "good", "late")
        gone.layout.parts[0]["path"] = "/nothing/there"
        with pytest.raises(EngineError, match="FileNotFoundError") as caught:
            await weights.apply(staged_update(gone))
        assert not isinstance(caught.value, TornWeightsError)
        assert weights.intact
        assert await weights.digests() == before


class TestLoader:
    """What runs inside SGLang's scheduler processes."""

    def execute(self, model: nn.Module, do: str, **more: object) -> dict[str, object]:
        with contextlib.closing(MemoryFile()) as note:
            command = json.dumps({"do": do, "answers": note.path, **more})
            loader.load(model, [(command, torch.empty(0))])
            answer: dict[str, object] = json.loads(note.read())
        return answer

    @pytest.mark.parametrize("model", [Copying(), Fragile()])
    def test_staged_tensors_get_in_place_and_are_known_from_then_on(self, model: Copying) -> None:
        tensors = [("good", "float32", (2, 2)), ("late", "float32", (2, 2))]
        self.execute(model, "trace", tensors=tensors)
        specs = [TensorSpec("good", "float32", (2, 2))]
        staged = allocate_on_host(specs).lend(specs)
        staged["good"].copy_(torch.arange(4.0).view(2, 2))
        opened = self.execute(model, "open", staged=staged.layout)
        assert model.fused.eq(0).all()
        put = self.execute(model, "apply")
        assert (opened["touched"], put["touched"], put["error"]) == (False, True, None)
        assert model.fused.tolist() == [[0, 1], [2, 3], [0, 0], [0, 0]]
        assert self.execute(model, "compare")["changed"] == []
        model.fused.data[0, 0] = 1
        assert self.execute(model, "compare")["changed"] == ["fused"]

    def test_a_failure_says_whether_weights_were_touched(self, tmp_path: Path) -> None:
        specs = [TensorSpec(name, "float32", (2, 2)) for name in ("good", "bad")]
        staged = allocate_on_host(specs).lend(specs)
        model = Fragile()
        self.execute(model, "open", staged=staged.layout)
        torn = self.execute(model, "apply")
        assert torn["touched"]
        assert torn["error"] == "KeyError: 'bad'"
        staged.layout.parts[0]["path"] = str(tmp_path / "nothing")
        intact = self.execute(Fragile(), "open", staged=staged.layout)
        assert not intact["touched"]
        assert intact["error"]


class TestRecipe:
    """How a model loads, learned from its loader."""

    class Sharding(nn.Module):
        """Takes halves, transposed and broadcast, pads, and knows nothing of "other"."""

        def __init__(self) -> None:
            super().__init__()
            self.kept = nn.Parameter(torch.full((4, 3), 9.0))
            self.scale = nn.Parameter(torch.zeros(2, 2))

        def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in tensors:
                if name == "wide":
                    self.kept[:3].data.copy_(tensor.narrow(1, 2, 3).t())
                    self.kept[3:].data.fill_(0)
                elif name == "scale":
                    self.scale.data.copy_(tensor)

    def test_its_copies_do_what_the_loader_does(self) -> None:
        tensors = {
            "wide": torch.arange(15.0).view(3, 5),
            "other": torch.ones(7),
            "scale": torch.tensor(2.0),
        }
        loaded, copied = self.Sharding(), self.Sharding()
        loaded.load_weights(tensors.items())
        copied.kept.data[3:] = 0
        plan = trace_load(copied, [(n, "float32", t.shape) for n, t in tensors.items()])
        assert copied.kept[:3].eq(9).all()
        assert plan["other"] == []
        targets, sources = grouped_copy(plan, tensors)
        torch._foreach_copy_(targets, sources)
        assert copied.kept.tolist() == loaded.kept.tolist() != [[9.0] * 3] * 4
        assert copied.scale.tolist() == loaded.scale.tolist() == [[2, 2], [2, 2]]

    def test_a_loader_that_computes_has_none(self) -> None:
        model = Fragile()
        with pytest.raises(UntraceableLoadError, match="mul"):
            trace_load(model, [("good", "float32", (2, 2))])
        assert model.fused.eq(0).all()


@pytest.mark.parametrize(
    ("releases", "keeps", "refused"),
    [
        (False, False, set()),  # nothing is really freed
        (True, False, {SleepingWeights.HOST_BACKUP}),
        (True, True, set()),
    ],
)
def test_a_host_backup_is_what_sglang_was_started_with(
    releases: bool, keeps: bool, refused: set[SleepingWeights]
) -> None:
    args = SimpleNamespace(enable_memory_saver=releases, enable_weights_cpu_backup=keeps)
    assert unsupported_sleep(args).keys() == refused


def test_a_tied_output_is_an_alias(tmp_path: Path) -> None:
    flags("sglang", tmp_path)
    specs, digests = describe_checkpoint(tmp_path / "model", torch.bfloat16, torch.device("cpu"))
    by_name = {spec.name: spec for spec in specs}
    assert by_name["lm_head.weight"].alias_of == "model.embed_tokens.weight"
    assert {spec.dtype for spec in specs} == {"bfloat16"}
    assert digests.keys() == by_name.keys() - {"lm_head.weight"}
