"""TRL's own GRPOTrainer, sampling from two real servers."""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("trl", reason="TRL is in an environment of its own: make test-trl")

import torch
from rollwire_client import (
    Fleet,
    LogprobBasis,
    Publisher,
    PublishError,
    Retries,
    RollwireError,
    StalePublisherError,
)
from rollwire_client.integrations.trl import RollwireGeneration
from rollwire_client.sync import SyncFleet
from support import own, trl_training
from support.programs import ran
from support.servers import servers as start_servers
from transformers import TrainerCallback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_client import ServerInfo
    from support.servers import StartServer
    from trl import GRPOTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trl_grpo.py"
GUIDE = ROOT / "docs" / "trl.md"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of two servers. Versions rise from one test to the next."""
    torch.set_num_threads(1)
    with start_servers(tmp_path_factory.mktemp("servers")) as start:
        yield [start().address, start().address]


async def infos(addresses: list[str]) -> list[ServerInfo]:
    async with Fleet(addresses) as fleet:
        return list((await fleet.info()).values())


def served(addresses: list[str]) -> tuple[set[int | None], set[int]]:
    """Versions and digests of the servers' weights."""
    tags = [info.weights for info in asyncio.run(infos(addresses))]
    return {tag.version for tag in tags}, {tag.digest for tag in tags}


def sampled(addresses: list[str]) -> list[int]:
    return [info.sampled_tokens for info in asyncio.run(infos(addresses))]


def newest(addresses: list[str]) -> int:
    async def ask() -> int | None:
        async with Fleet(addresses) as fleet:
            return await fleet.newest_version()

    version = asyncio.run(ask())
    return -1 if version is None else version


def test_log_probabilities_are_the_trainers_own(servers: list[str], tmp_path: Path) -> None:
    before, tokens = newest(servers), sampled(servers)
    trainer = trl_training.make(tmp_path)
    settings = copy.deepcopy(trainer.args.to_dict())
    with RollwireGeneration(trainer, SyncFleet(servers)) as generation:
        trainer.train()
        assert generation.report is not None
        assert served(servers) == ({before + 8}, {generation.report.digest})
    assert trl_training.worst_difference(trainer) < 1e-5
    assert all(now > then for now, then in zip(sampled(servers), tokens, strict=True))
    # Nothing of the caller's has changed.
    assert trainer.args.to_dict() == settings
    assert not trainer.use_vllm


@pytest.mark.parametrize("basis", [LogprobBasis.TEMPERATURE, LogprobBasis.SAMPLED])
def test_truncated_sampling(servers: list[str], tmp_path: Path, basis: LogprobBasis) -> None:
    trainer = trl_training.make(tmp_path, max_steps=1, temperature=0.7, top_p=0.5)
    with RollwireGeneration(trainer, SyncFleet(servers), logprob_basis=basis):
        trainer.train()
    (log,) = [e for e in trainer.state.log_history if trl_training.DIFFERENCE in e]
    if basis is LogprobBasis.TEMPERATURE:
        assert log[trl_training.DIFFERENCE] < 1e-5
    else:  # the nucleus has half of the probability
        difference = log["sampling/sampling_logp_difference/mean"]
        assert difference == pytest.approx(math.log(2), abs=0.05)


def test_adapters_are_merged_into_what_is_published(servers: list[str], tmp_path: Path) -> None:
    trainer = trl_training.make(tmp_path, lora=True)
    base = {
        name: parameter.clone()
        for name, parameter in trainer.model.named_parameters()
        if not parameter.requires_grad
    }
    _, before = served(servers)
    with RollwireGeneration(trainer, SyncFleet(servers)):
        trainer.train()
        (version,), (digest,) = served(servers)
    assert trl_training.worst_difference(trainer) < 1e-5
    assert {digest} != before
    for name, parameter in trainer.model.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name]), name
    assert not any(getattr(module, "merged", False) for module in trainer.model.modules())
    assert version is not None


def test_two_processes(servers: list[str], tmp_path: Path) -> None:
    """Plain, with an adapter, and with tools, of which each process calls its own number; then with
    a third server, which there is not, required.
    """
    before = newest(servers)
    nobody = f"{own.host()}:9"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = trl_training.__file__
    ran(*torchrun, script, *servers, nobody, "--folder", str(tmp_path), cwd=tmp_path)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    versions = [before + 8, before + 16, before + 18]
    assert [outcome["version"] for outcome in first[:3]] == versions
    assert [outcome["version"] for outcome in second[:3]] == versions
    for outcome in first[:3]:
        assert outcome["processes"] == 2
        assert outcome["difference"] < 1e-5
    assert f"version {before + 19} is on 2 of 3 servers" in first[3]["error"]
    assert second[3]["error"] == f"rank 0: {first[3]['error']}"


@pytest.mark.slow
def test_the_example_learns(servers: list[str], tmp_path: Path) -> None:
    done = ran(EXAMPLE, "--servers", *servers, cwd=tmp_path)
    found = re.search(r"reward (\d\.\d+) → (\d\.\d+)\n.* difference (\S+)\n", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 0.1
    assert float(found[2]) > 0.8
    assert float(found[3]) < 1e-5


def test_every_turn_of_a_conversation_with_tools_is_sampled_by_the_servers(
    servers: list[str], tmp_path: Path
) -> None:
    tokens = sampled(servers)
    trainer = trl_training.make(
        tmp_path, max_steps=2, tools=[trl_training.double], max_completion_length=600
    )
    with RollwireGeneration(trainer, SyncFleet(servers)):
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "tools/call_frequency" in entry]
    assert sum(log["tools/call_frequency"] for log in logs) > 0
    assert trl_training.worst_difference(trainer) < 1e-5
    mean = sum(log["completions/mean_length"] for log in logs)
    assert sum(sampled(servers)) - sum(tokens) >= round(16 * mean)


def test_each_train_publishes_before_it_samples(servers: list[str], tmp_path: Path) -> None:
    before = newest(servers)
    trainer = trl_training.make(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    with RollwireGeneration(trainer, SyncFleet(servers)) as generation:
        trainer.train()
        assert generation.version == before + 1
        trainer.train()  # again from step 0, with the parameters of step 1
        assert generation.version == before + 2
        assert served(servers)[0] == {before + 2}
    assert trl_training.worst_difference(trainer) < 1e-5

    resumed = trl_training.make(tmp_path, max_steps=2)
    with RollwireGeneration(resumed, SyncFleet(servers)) as generation:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert generation.version == before + 3
    assert trl_training.worst_difference(resumed) < 1e-5


def test_evaluation(servers: list[str], tmp_path: Path) -> None:
    before = newest(servers)
    trainer = trl_training.make(tmp_path, num_generations_eval=2, per_device_eval_batch_size=4)
    with RollwireGeneration(trainer, SyncFleet(servers)):
        metrics = trainer.evaluate()
        assert served(servers)[0] == {before + 1}
    assert metrics["eval_sampling/sampling_logp_difference/max"] < 1e-5


class TrainsAnother(TrainerCallback):
    """The model that is published is not the one that is trained."""

    def __init__(self) -> None:
        self.trainer: GRPOTrainer | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self.trainer.model = copy.deepcopy(self.trainer.model)


def test_a_policy_that_does_not_change_though_it_is_trained(
    servers: list[str], tmp_path: Path
) -> None:
    callback = TrainsAnother()
    trainer = callback.trainer = trl_training.make(tmp_path, callbacks=[callback])
    with (
        RollwireGeneration(trainer, SyncFleet(servers)) as generation,
        pytest.raises(PublishError, match="what is trained does not reach the servers"),
    ):
        trainer.train()
    assert trainer.state.global_step == 1
    assert generation.report is not None


def test_a_policy_that_learns_nothing_may_stay_the_same(servers: list[str], tmp_path: Path) -> None:
    trainer = trl_training.make(tmp_path, max_steps=2, learning_rate=0.0)
    with RollwireGeneration(trainer, SyncFleet(servers)):
        trainer.train()
    assert trainer.state.global_step == 2


class Kills(TrainerCallback):
    """Has something happen after the first step."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 1:
            self.action()


def test_a_server_dies(start_server: StartServer, tmp_path: Path) -> None:
    both = [start_server(), start_server()]
    addresses = [server.address for server in both]
    trainer = trl_training.make(tmp_path, max_steps=3, callbacks=[Kills(both[0].kill)])
    with RollwireGeneration(trainer, SyncFleet(addresses)) as generation:
        trainer.train()
        assert generation.report is not None
        assert [server.address for server in generation.report.failed] == addresses[:1]
    assert trainer.state.global_step == 3


def test_all_servers_are_required(start_server: StartServer, tmp_path: Path) -> None:
    both = [start_server(), start_server()]
    addresses = [server.address for server in both]
    trainer = trl_training.make(tmp_path, max_steps=3, callbacks=[Kills(both[0].kill)])
    with (
        RollwireGeneration(trainer, SyncFleet(addresses), require="all"),
        pytest.raises(PublishError, match="is on 1 of 2 servers"),
    ):
        trainer.train()


async def publish(addresses: list[str]) -> None:
    async with Fleet(addresses) as fleet:
        version = (await fleet.newest_version() or 0) + 1
        await Publisher(fleet).publish_and_wait(version, trl_training.model().state_dict())


def test_somebody_else_publishes(servers: list[str], tmp_path: Path) -> None:
    """Before the generation, and before the next publish."""
    fleet = SyncFleet(servers, retries=Retries(seconds=1))
    trainer = trl_training.make(tmp_path, max_steps=1)
    with RollwireGeneration(trainer, fleet) as generation:
        generation.sync_weights()
        asyncio.run(publish(servers))
        with pytest.raises(RollwireError, match=r"version"):
            generation.generate([[5, 6, 7]], None, 1)
        with pytest.raises(StalePublisherError):
            generation.sync_weights()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"generation_kwargs": {"num_beams": 1}}, "generation_kwargs has num_beams"),
    ],
)
def test_what_servers_do_not_do_is_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    trainer = trl_training.make(tmp_path, **settings)
    with pytest.raises(ValueError, match=problem):
        RollwireGeneration(trainer, SyncFleet(["127.0.0.1:5"]))


def test_models_that_cannot_be_published_are_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    fleet = SyncFleet(["127.0.0.1:5"])
    trainer = trl_training.make(tmp_path)
    plain = trainer.model
    trainer.model = get_peft_model(
        trl_training.model(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(ValueError, match="not merged into weights"):
        RollwireGeneration(trainer, fleet)
    trainer.model = get_peft_model(
        trl_training.model(), LoraConfig(target_modules=["embed_tokens", "q_proj"])
    )
    with pytest.raises(ValueError, match="share one tensor"):
        RollwireGeneration(trainer, fleet)
    plain.is_quantized = True
    trainer.model = plain
    with pytest.raises(ValueError, match="is quantized"):
        RollwireGeneration(trainer, fleet)
    with pytest.raises(TypeError, match="not a SyncFleet"):
        RollwireGeneration(trainer, ["127.0.0.1:5"])  # type: ignore[arg-type]


def test_the_guide_names_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs need a download or a GPU: here only their names are looked up."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        tree = ast.parse(block)
        names: dict[str, Any] = {}
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), "guide", "exec"), names)  # noqa: S102 - our own
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name):
                named = {argument.arg: None for argument in call.keywords}
                inspect.signature(names[call.func.id]).bind(*call.args, **named)


def adapters() -> dict[str, Any]:
    from peft import LoHaConfig, LoraConfig

    projections = ["q_proj", "v_proj", "down_proj"]
    return {
        "lora": LoraConfig(r=4, target_modules=projections, lora_dropout=0.1, bias="lora_only"),
        "rslora": LoraConfig(r=4, target_modules=projections, use_rslora=True),
        "dora": LoraConfig(r=4, target_modules=projections, use_dora=True),
        "loha": LoHaConfig(r=4, target_modules=projections),
        "trained modules": LoraConfig(r=4, target_modules=projections, modules_to_save=["norm"]),
    }


@pytest.mark.parametrize("name", ["lora", "rslora", "dora", "loha", "trained modules"])
def test_what_is_published_of_adapters(name: str) -> None:
    """The tensors of the merged model, bit for bit, under the names of the plain one."""
    from peft import get_peft_model
    from rollwire_client.integrations.trl._policy import check_model, policy_tensors

    model = get_peft_model(trl_training.model(), adapters()[name])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model.train()
    check_model(model)
    published = dict(policy_tensors(model))
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    plain = trl_training.model()
    assert published.keys() == dict(plain.named_parameters()).keys()
    changed = 0
    for key, tensor in published.items():
        assert torch.equal(tensor, merged[key]), key
        changed += not torch.equal(tensor, plain.state_dict()[key])
    assert changed >= 6
