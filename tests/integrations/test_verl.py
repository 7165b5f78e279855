"""verl's own managers and clients over real servers, and the parts of the integration alone."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("verl", reason="verl is in an environment of its own: make test-verl")

import pandas
import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from rollwire_client import Fleet, PublishError, Sampling, SchemaMismatchError, SourceError
from rollwire_client.integrations.verl import RollwireCheckpointEngine
from rollwire_client.integrations.verl._actor import RolloutActor
from rollwire_client.integrations.verl._options import FleetOptions, PublishOptions
from rollwire_client.integrations.verl._sampling import sampling
from rollwire_client.integrations.verl._weights import RereadableWeights
from rollwire_server import builtin_model
from support import verl_training
from support.programs import ran
from support.servers import ServerProcess
from support.servers import servers as start_servers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils import omega_conf_to_dataclass
from verl.utils.config import validate_config
from verl.utils.reward_score import default_compute_score

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_client import ServerInfo
    from support.servers import StartServer
    from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SECONDS = 400
TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "verl_gsm8k"


# One run of verl, and what was seen in it.


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("verl")
    policy = verl_training.make_policy(folder / "policy")
    with start_servers(folder) as start:
        servers = [start("--model", str(policy)) for _ in range(2)]
        yield run(folder, servers)


def run(folder: Path, servers: list[ServerProcess]) -> dict[str, Any]:
    log = folder / "verl.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [
                sys.executable, TESTS / "support" / "verl_training.py", folder,
                "--servers", *(server.address for server in servers),
                "--victim", str(servers[1].process.pid),
            ],
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=output, stderr=output, timeout=SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()[-10_000:]
    result: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return result


@pytest.mark.slow
class TestVerl:
    def test_three_versions_are_sampled_as_the_actor_computes_them(
        self, seen: dict[str, Any]
    ) -> None:
        for version, one in enumerate(seen["rounds"], start=1):
            assert one["difference"] < 1e-5
            assert one["versions"] == [[version]] * 3  # global_steps, and its range
            assert one["metrics"]["rollwire/servers_updated"] == 2

    def test_sequences_go_on_under_the_new_policy_when_an_update_interrupts_them(
        self, seen: dict[str, Any]
    ) -> None:
        fully_async, rollwire = seen["in_flight"]
        assert fully_async["rows"] == rollwire["rows"] == 32
        assert fully_async["interrupted"] == rollwire["interrupted"] == 1
        assert max(fully_async["difference"], rollwire["difference"]) < 1e-5
        assert [3, 3] in fully_async["ranges"]  # its client keeps one version: the oldest
        assert [4, 5] in rollwire["ranges"]

    def test_turns_of_a_conversation_find_their_prefix(self, seen: dict[str, Any]) -> None:
        assert seen["conversation"] == [0, 47, 58] * 2

    def test_a_validation_batch_is_not_repeated_again(self, seen: dict[str, Any]) -> None:
        assert seen["validation"] == 6

    def test_the_hybrid_mode_is_refused_by_name(self, seen: dict[str, Any]) -> None:
        for part in ("hybrid replica", "hybrid rollout"):
            assert "no hybrid (colocated) mode yet" in seen["refusals"][part]

    def test_another_checkpoint_engine_is_refused(self, seen: dict[str, Any]) -> None:
        assert "the checkpoint engine is 'nccl'" in seen["refusals"]["nccl"]

    def test_an_unknown_sampling_parameter_is_refused(self, seen: dict[str, Any]) -> None:
        assert "rollwire cannot do repetition_penalty=1.2" in seen["refusals"]["penalty"]

    def test_a_death_costs_one_server(self, seen: dict[str, Any]) -> None:
        metrics = seen["death"]["metrics"]
        assert (metrics["rollwire/servers_updated"], metrics["rollwire/servers_failed"]) == (1, 1)
        assert seen["death"]["versions"] == [6]
        assert seen["death"]["difference"] < 1e-5

    def test_a_policy_that_did_not_change_is_an_error(self, seen: dict[str, Any]) -> None:
        assert "the last 2 versions, up to 7, have the same weights" in seen["unchanged"]


# The checkpoint engine, in this process.


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A trainer of one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def policy() -> dict[str, Tensor]:
    return builtin_model("builtin:tiny").state_dict()


def engine(*servers: ServerProcess, **options: Any) -> RollwireCheckpointEngine:
    made = RollwireCheckpointEngine(
        bucket_size=64 << 20,
        is_master=True,
        servers=[server.address for server in servers],
        backend="gloo",
        **options,
    )
    made.init_process_group(rank=0)
    return made


async def served(server: ServerProcess) -> ServerInfo:
    async with Fleet([server.address]) as fleet:
        info = (await fleet.info())[server.address]
    assert not isinstance(info, Exception)
    return info


async def test_verls_masters_are_cast_to_the_dtype_of_the_servers(
    one_rank: None, start_server: StartServer, policy: dict[str, Tensor]
) -> None:
    server = start_server()
    masters = ((name, tensor.double()) for name, tensor in policy.items())
    await engine(server).send_weights(masters, global_steps=1)
    assert (await served(server)).weights.version == 1


async def test_only_the_first_publish_may_lower_the_version(
    one_rank: None, start_server: StartServer, policy: dict[str, Tensor]
) -> None:
    server = start_server()
    await engine(server).send_weights(policy.items(), global_steps=50)
    resumed = engine(server)
    changed = {name: tensor * 1.01 for name, tensor in policy.items()}
    await resumed.send_weights(changed.items(), global_steps=30)
    assert (await served(server)).weights.version == 30
    with pytest.raises(PublishError, match="version 20"):
        await resumed.send_weights(policy.items(), global_steps=20)
    assert (await served(server)).weights.version == 30


async def test_adapters_that_are_not_merged_are_refused(
    one_rank: None, start_server: StartServer, policy: dict[str, Tensor]
) -> None:
    server = start_server()
    adapted = {
        name.replace("q_proj.weight", "q_proj.base_layer.weight"): tensor
        for name, tensor in policy.items()
    }
    with pytest.raises(SchemaMismatchError, match="Merge the adapter first"):
        await engine(server).send_weights(adapted.items(), global_steps=1)
    assert (await served(server)).weights.version is None


async def test_a_merged_adapter_is_published_as_verl_gives_it(
    one_rank: None, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.workers.engine.fsdp import transformer_impl  # warns when it is imported

    server = start_server()
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(builtin_model("builtin:tiny"), adapter)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for part in (*model.base_model.model.model.layers, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    # Both need a GPU.
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "log_gpu_memory_usage", lambda *_, **__: None)
    actor = SimpleNamespace(module=model, _is_offload_param=False)
    weights = transformer_impl.FSDPEngine._merged_lora_per_tensor_param(actor)
    await engine(server).send_weights(weights, global_steps=1)
    now = (await served(server)).weights
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), before[name]), name
    rounded = {name: tensor.bfloat16() for name, tensor in merged.items()}  # as verl does
    await engine(server).send_weights(rounded.items(), global_steps=2)
    assert (await served(server)).weights.digest == now.digest


async def test_steps_without_a_gradient_are_borne_and_a_frozen_policy_is_not(
    one_rank: None, start_server: StartServer, policy: dict[str, Tensor]
) -> None:
    server = start_server()
    publishing = engine(server, max_unchanged=2)
    changed = {name: tensor * 1.01 for name, tensor in policy.items()}
    for version, weights in enumerate([policy, policy, policy, changed, changed, changed]):
        await publishing.send_weights(reversed(weights.items()), global_steps=version)
    with pytest.raises(PublishError, match="the last 4 versions, up to 6, have the same weights"):
        await publishing.send_weights(changed.items(), global_steps=6)


async def test_other_rollouts_than_rollwires_are_refused(start_server: StartServer) -> None:
    made = RollwireCheckpointEngine(bucket_size=1, servers=[start_server().address])
    with pytest.raises(PublishError, match="publishes to rollwire's servers only"):
        await anext(made.receive_weights())


async def test_servers_that_missed_an_update_get_no_sequences(
    one_rank: None, start_server: StartServer, policy: dict[str, Tensor]
) -> None:
    updated, behind = start_server(), start_server()
    await engine(updated).send_weights(policy.items(), global_steps=1)
    actor = RolloutActor(FleetOptions([updated.address, behind.address]), CONFIG)
    await actor.open()
    assert actor._fleet is not None
    try:
        await actor.update_weights(global_steps=1)
        await actor.resume_generation()
        made = await asyncio.gather(
            *(actor.generate([1, 2, 3], {"max_tokens": 16}, str(number)) for number in range(8))
        )
    finally:
        await actor._fleet.close()
    assert {output.extra_fields["min_global_steps"] for output in made} == {1}


@pytest.mark.parametrize("at", [0.3, 0.9])
async def test_a_server_that_dies_while_weights_are_sent_costs_one_server(
    one_rank: None, start_server: StartServer, policy: dict[str, Tensor], at: float
) -> None:
    alive, victim = start_server(), start_server()
    victim.breaks = True
    publishing = engine(alive, victim, bucket_bytes=4096)
    await publishing.send_weights(policy.items(), global_steps=1)
    changed = {name: tensor * 1.01 for name, tensor in policy.items()}
    closed = []

    def dying() -> Iterator[tuple[str, Tensor]]:
        try:
            for number, item in enumerate(changed.items()):
                if number == int(at * len(changed)):
                    victim.kill()
                yield item
        finally:
            closed.append(True)

    metrics = await publishing.send_weights(dying(), global_steps=2)
    assert (metrics["rollwire/servers_updated"], metrics["rollwire/servers_failed"]) == (1, 1)
    assert closed == [True]
    now = (await served(alive)).weights
    whole = engine(alive)
    await whole.send_weights(changed.items(), global_steps=3)
    assert now.version == 2
    assert (await served(alive)).weights.digest == now.digest


def test_weights_that_are_read_again_are_kept_as_far_as_there_is_room() -> None:
    weights = RereadableWeights(
        ((name, torch.full((4,), float(number))) for number, name in enumerate("abcdef")),
        dict.fromkeys("abcdef", 8),  # the servers have bfloat16
        keep_bytes=20,
    )
    first = weights()
    for _ in range(4):
        next(first)
    first.close()
    again = dict(weights())
    assert list(again) == [*"abcdef"]
    assert [name for name, value in again.items() if not isinstance(value, torch.Tensor)] == ["a"]
    with pytest.raises(SourceError, match="needs a again"):
        again["a"]()  # type: ignore[operator]
    assert torch.equal(again["c"], torch.full((4,), 2.0))  # type: ignore[arg-type]


async def test_every_server_can_be_required(
    one_rank: None, start_server: StartServer, policy: dict[str, Tensor]
) -> None:
    alive, dead = start_server(), start_server()
    strict = engine(alive, dead, require="all")
    dead.kill()
    with pytest.raises(PublishError, match="version 1 is on 1 of 2 servers"):
        await strict.send_weights(policy.items(), global_steps=1)


# The recipe.


def recipe(*overrides: str) -> Any:
    """Its configuration, as the command of its README composes it."""
    configs = Path(verl.__file__).parent / "experimental" / "fully_async_policy" / "config"
    searched = f"hydra.searchpath=[pkg://verl.trainer.config,file://{EXAMPLE}]"
    with initialize_config_dir(config_dir=str(configs), version_base=None):
        config = compose(
            "fully_async_ppo_trainer", overrides=[searched, "+recipe=gsm8k", *overrides]
        )
    config.actor_rollout_ref.rollout.nnodes = config.rollout.nnodes
    config.actor_rollout_ref.rollout.n_gpus_per_node = config.rollout.n_gpus_per_node
    OmegaConf.resolve(config)
    return config


def test_the_recipe_is_a_configuration_of_verls() -> None:
    config = recipe("servers=[10.0.0.1:7000,10.0.0.2:7000]")
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert config.actor_rollout_ref.hybrid_engine is False
    assert (config.data.train_batch_size, config.data.gen_batch_size) == (0, 1)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    servers = ["10.0.0.1:7000", "10.0.0.2:7000"]
    assert FleetOptions.of(rollout.engine_kwargs["rollwire"], "here").servers == servers
    backend = rollout.checkpoint_engine.backend
    CheckpointEngineRegistry.new(
        backend, bucket_size=1 << 20, **rollout.checkpoint_engine.engine_kwargs[backend]
    )


def test_the_data_of_the_recipe_is_what_verl_rewards(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps({"question": "1000 + 234?", "answer": "Easy.\n#### 1,234"}))
    command = [EXAMPLE / "prepare.py", source, "--to", tmp_path / "made"]
    ran(*command)
    (row,) = pandas.read_parquet(tmp_path / "made" / "train.parquet").to_dict("records")
    scores = [
        default_compute_score(row["data_source"], said, row["reward_model"]["ground_truth"])
        for said in ("so #### 1234", "so #### 1235", "1234")
    ]
    assert scores == [1.0, 0.0, 0]
    assert row["prompt"][0]["content"].startswith("1000 + 234? Let's think")


# What verl asks for.


CONFIG = SimpleNamespace(
    prompt_length=16,
    response_length=32,
    repetition_penalty=1.0,
    ignore_eos=False,
    full_determinism=False,
    seed=42,
)


def test_the_callers_parameters_stay_as_they_are() -> None:
    params = {
        "temperature": 0.7, "top_p": 0.9, "top_k": -1, "logprobs": True, "max_tokens": 8,
        "stop_token_ids": [3], "repetition_penalty": 1.0, "n": 1,
    }  # fmt: skip
    before = dict(params)
    made, with_logprobs = sampling(params, CONFIG, 16, "a")
    assert params == before
    assert with_logprobs
    assert made == Sampling(
        temperature=0.7, top_p=0.9, top_k=-1, max_new_tokens=8, stop_token_ids=(3,)
    )


def test_the_limit_is_what_the_configured_lengths_leave() -> None:
    limits = [sampling({}, CONFIG, length, "a")[0].max_new_tokens for length in (10, 16, 40, 60)]
    assert limits == [32, 32, 8, 1]


def test_full_determinism_seeds_each_turn_of_each_request() -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "full_determinism": True})
    turns = [("a", 10), ("a", 20), ("b", 10), ("a", 10)]
    seeds = [sampling({}, config, length, name)[0].seed for name, length in turns]
    assert None not in seeds
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    "params", [{"n": 2}, {"stop": ["x"]}, {"guided_json": "{}"}, {"presence_penalty": 1.0}]
)
def test_what_rollwire_does_not_have_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        sampling(params, CONFIG, 10, "a")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "here.servers is missing"),
        ({"servers": ["a:1"], "server": 1}, "here has no option server; it has servers"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        FleetOptions.of(options, "here")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_policy": "drop"}, "kv_policy"),
        ({"max_kv_lag": -1}, "max_kv_lag"),
        ({"kv_policy": "recompute", "max_kv_lag": 2}, "max_kv_lag"),
        ({"require": "most"}, "require"),
        ({"max_unchanged": -1}, "max_unchanged"),
        ({"timeouts": {"sauce": 60}}, "sauce"),
        ({"timeouts": {"source": -1}}, "source"),
    ],
)
def test_wrong_ways_to_publish_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        PublishOptions.split(options)
