"""A trainer of verl's for tests, run as a script: verl's own managers over real rollwire servers.

The trainer's part is two FSDP2 ranks on the CPU, with gloo. What was seen is written as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rollwire_client import RolloutClient
from rollwire_client.integrations.verl import RollwireAgentLoopManager, RollwireServerClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.experimental.agent_loop import AgentLoopManager
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

RANKS = 2
RESPONSE = 512  # tokens
_SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_policy(folder: Path) -> Path:
    """A random Qwen2 of two layers, and a tokenizer with a token for each byte."""
    vocabulary = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        extra_special_tokens={"begin": _SPECIAL[1]},
        padding_side="left",
    )
    tokenizer.chat_template = _TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Trainer(Worker):
    """What verl's actor does to publish, on a CPU."""

    def __init__(self, policy: str, engine: dict[str, Any]) -> None:
        super().__init__()
        torch.set_num_threads(1)
        initialize_global_process_group_ray(backend="cpu:gloo")
        self.model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (RANKS,)))
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "rollwire", is_master=self.rank == 0, bucket_size=64 << 20, **engine
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        tensors = reversed(self.model.state_dict().items())  # an order of its own
        weights = ((name, tensor.full_tensor()) for name, tensor in tensors)
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **named: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **named)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed: int) -> None:
        """Changes the weights, as training would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in self.model.parameters():
                noise = torch.randn(tensor.shape, generator=generator) * 0.02
                tensor.add_(distribute_tensor(noise, tensor.device_mesh, tensor.placements))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.full_tensor() for name, tensor in self.model.state_dict().items()}


class Scenario:
    """verl's managers, and what is seen of them."""

    def __init__(self, policy: Path, servers: Sequence[str]) -> None:
        self.servers = servers
        self.config = compose_config(policy, servers)
        rollout = self.config.actor_rollout_ref.rollout
        engine = OmegaConf.to_container(rollout.checkpoint_engine.engine_kwargs.rollwire)
        self.actor = RayWorkerGroup(
            resource_pool=RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(num_cpus=0)(Trainer), policy=str(policy), engine=engine
            ),
            use_gpu=False,
            device_name="cpu",
        )
        self.manager = LLMServerManager.create(config=self.config)
        self.checkpoints = CheckpointEngineManager(
            config=omega_conf_to_dataclass(rollout.checkpoint_engine),
            actor_wg=self.actor,
            replicas=self.manager.get_replicas(),
        )
        self.fully_async = AgentLoopManager.create(
            config=self.config,
            llm_client=self.manager.get_client(client_cls=FullyAsyncLLMServerClient),
        )
        self.agents = RollwireAgentLoopManager.create(
            config=self.config, llm_client=self.manager.get_client()
        )
        self.model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)

    def update(self, version: int) -> dict[str, float]:
        """Trains one step, and publishes it."""
        self.actor.step(version)
        metrics: dict[str, float] = self.checkpoints.update_weights(global_steps=version)
        return metrics

    def weights(self) -> dict[str, torch.Tensor]:
        """The actor's, whole."""
        whole: dict[str, torch.Tensor] = self.actor.state()[0]
        return whole

    def differences(self, made: DataProto, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of the log-probability of each sampled token to what these weights give it."""
        self.model.load_state_dict(weights)
        batch = made.batch
        length = batch["response_mask"].shape[1]
        with torch.no_grad():
            logits = self.model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                position_ids=batch["position_ids"],
            ).logits
        logprobs = logits.log_softmax(-1)[:, -length - 1 : -1]
        own = logprobs.gather(-1, batch["input_ids"][:, -length:, None])[..., 0]
        return (own - batch["rollout_log_probs"]).abs() * batch["response_mask"]

    def worst(self, made: DataProto) -> float:
        """The largest difference to the actor."""
        return float(self.differences(made, self.weights()).max())


def compose_config(policy: Path, servers: Sequence[str], *more: str) -> Any:
    """verl's own configuration, for these servers."""
    rollout = "actor_rollout_ref.rollout"
    listed = ",".join(servers)
    with initialize_config_dir(
        config_dir=str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None
    ):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={policy}",
                "actor_rollout_ref.hybrid_engine=False",
                f"{rollout}.name=rollwire",
                f"{rollout}.nnodes=1",
                f"{rollout}.n_gpus_per_node={len(servers)}",
                f"{rollout}.tensor_model_parallel_size=1",
                f"{rollout}.prompt_length=64",
                f"{rollout}.response_length={RESPONSE}",
                f"{rollout}.calculate_log_probs=True",
                f"{rollout}.agent.num_workers=1",
                f"+{rollout}.engine_kwargs.rollwire.servers=[{listed}]",
                f"{rollout}.checkpoint_engine.backend=rollwire",
                f"+{rollout}.checkpoint_engine.engine_kwargs.rollwire.servers=[{listed}]",
                f"+{rollout}.checkpoint_engine.engine_kwargs.rollwire.max_unchanged=0",
                # Log-probabilities are compared with those of a forward pass of one policy.
                f"+{rollout}.checkpoint_engine.engine_kwargs.rollwire.kv_policy=recompute",
                *more,
            ],
        )


def prompts(count: int, *, validate: bool = False, repeated: int = 1) -> DataProto:
    """Chats; for validation, verl has repeated them already."""
    texts = [f"say {number}" for number in range(count) for _ in range(repeated)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    rewards = [{"ground_truth": ""}] * len(texts)
    made = DataProto.from_dict(
        non_tensors={
            "raw_prompt": np.array(chats, dtype=object),
            "data_source": np.array(["toy"] * len(texts), dtype=object),
            "reward_model": np.array(rewards, dtype=object),
        }
    )
    made.meta_info["validate"] = validate
    return made


def versions(made: DataProto, which: str = "global_steps") -> list[int]:
    """The versions of a batch's rows, each once."""
    return sorted(set(made.non_tensor_batch[which]))


def rounds(scenario: Scenario) -> list[dict[str, Any]]:
    """Three versions: publish, sample, compare."""
    seen = []
    for version in (1, 2, 3):
        metrics = scenario.update(version)
        made = scenario.fully_async.generate_sequences(prompts(6))
        seen.append(
            {
                "metrics": metrics,
                "difference": scenario.worst(made),
                "versions": [versions(made, f"{end}global_steps") for end in ("", "min_", "max_")],
            }
        )
    return seen


def in_flight(scenario: Scenario) -> list[dict[str, Any]]:
    """An update while sequences are sampled, with verl's client and with rollwire's."""
    seen = []
    for version, agents in ((4, scenario.fully_async), (5, scenario.agents)):
        older = scenario.weights()
        scenario.actor.step(version)
        made: list[DataProto] = []
        before = asyncio.run(sampled_tokens(scenario.servers))
        sampling = threading.Thread(
            target=lambda a=agents, m=made: m.append(a.generate_sequences(prompts(32)))
        )
        sampling.start()
        asyncio.run(pause(scenario.servers, before + 64))
        scenario.checkpoints.update_weights(global_steps=version)
        asyncio.run(resume(scenario.servers))
        sampling.join()
        both = [scenario.differences(made[0], one) for one in (older, scenario.weights())]
        ends = [made[0].non_tensor_batch[f"{end}global_steps"] for end in ("min_", "max_")]
        seen.append(
            {
                "rows": len(made[0]),
                "ranges": sorted({(int(low), int(high)) for low, high in zip(*ends, strict=True)}),
                "difference": float(torch.minimum(*both).max()),
                "interrupted": int(made[0].meta_info["timing"]["agent_loop/num_preempted/max"]),
            }
        )
    return seen


@contextlib.asynccontextmanager
async def clients(servers: Sequence[str]) -> AsyncIterator[list[RolloutClient]]:
    """One for each server."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(RolloutClient(server)) for server in servers]


async def sampled_tokens(servers: Sequence[str]) -> int:
    """Of all servers, since they were started."""
    async with clients(servers) as each:
        return sum([(await client.info()).sampled_tokens for client in each])


async def pause(servers: Sequence[str], tokens: int) -> None:
    """Holds what is sampled, once so many tokens have been."""
    async with asyncio.timeout(60), clients(servers) as each:
        while sum([(await client.info()).sampled_tokens for client in each]) < tokens:
            pass
        assert sum([(await client.pause("test")).held_sequences for client in each])


async def resume(servers: Sequence[str]) -> None:
    """Ends the pauses."""
    async with clients(servers) as each:
        for client in each:
            await client.resume("test")


def conversation(scenario: Scenario) -> list[int]:
    """Tokens of each turn that were read from the prefix cache: three turns, twice."""
    client = RollwireServerClient.of(scenario.manager.get_client())

    async def converse(name: str) -> list[int]:
        tokens, cached = [10 + len(name)] * 40, []
        for _ in range(3):
            turn = await client.generate(
                name, prompt_ids=tokens, sampling_params={"max_tokens": 8, "ignore_eos": True}
            )
            cached.append(turn.extra_fields["num_cached_tokens"])
            tokens = tokens + turn.token_ids + [5, 6, 7]
        return cached

    async def both() -> list[int]:
        return [c for cached in await asyncio.gather(converse("a"), converse("bb")) for c in cached]

    return asyncio.run(both())


def message(attempt: Callable[[], Any]) -> str:
    """The error that it ends with."""
    try:
        attempt()
    except Exception as error:
        return str(error).strip().splitlines()[-1]  # before it, the traceback of ray's process
    return "no error"


def refusals(scenario: Scenario) -> dict[str, str]:
    """What is refused."""
    client = scenario.manager.get_client()
    penalty = {"repetition_penalty": 1.2}

    def sample() -> None:
        asyncio.run(client.generate("r", prompt_ids=[5, 6], sampling_params=penalty))

    nccl = scenario.config.copy()
    nccl.actor_rollout_ref.rollout.checkpoint_engine.backend = "nccl"
    return {
        "nccl": message(lambda: LLMServerManager.create(config=nccl)),
        "hybrid replica": message(
            lambda: LLMServerManager.create(config=scenario.config, worker_group=scenario.actor)
        ),
        "hybrid rollout": message(lambda: get_rollout_class("rollwire", "async")()),
        "penalty": message(sample),
    }


def death(scenario: Scenario, pid: int) -> dict[str, Any]:
    """A server dies: the next update goes to the other one, which samples everything."""
    os.kill(pid, signal.SIGKILL)
    metrics = scenario.update(6)
    made = scenario.agents.generate_sequences(prompts(6))
    return {
        "metrics": metrics,
        "difference": scenario.worst(made),
        "versions": versions(made),
    }


def validation(scenario: Scenario) -> int:
    """Rows of a validation batch of 3 prompts that verl has repeated twice."""
    return len(scenario.agents.generate_sequences(prompts(3, validate=True, repeated=2)))


def main() -> None:
    """Runs all parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--servers", nargs="+", required=True)
    parser.add_argument("--victim", type=int, required=True, help="process of one of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # its sockets have to fit
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=short,
            object_store_memory=100 << 20,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
        )
        try:
            scenario = Scenario(options.folder / "policy", options.servers)
            seen: dict[str, Any] = {}
            for part in (rounds, in_flight, conversation, validation, refusals):
                seen[part.__name__] = part(scenario)
            seen["death"] = death(scenario, options.victim)
            seen["unchanged"] = message(lambda: scenario.checkpoints.update_weights(global_steps=7))
        finally:
            ray.shutdown()
    (options.folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
