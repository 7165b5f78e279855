"""TRL's own AsyncRolloutWorker, sampling from two real servers through the HTTP gateway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("trl", reason="TRL is in an environment of its own: make test-trl")

import torch
from accelerate.state import PartialState
from rollwire_client import Fleet, Sampling
from rollwire_client.integrations.trl import AsyncRollouts
from rollwire_client.sync import SyncFleet
from support import trl_attention, trl_training
from support.gateways import gateways
from support.servers import servers as start_servers
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

GROUP = 4
LENGTH = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("policy")
    trl_training.model().save_pretrained(made)
    trl_training.tokenizer().save_pretrained(made)
    trl_attention.install()
    torch.set_num_threads(1)
    return made


@pytest.fixture
def servers(tmp_path: Path, folder: Path) -> Iterator[list[str]]:
    with start_servers(tmp_path) as start:
        yield [start("--model", str(folder)).address for _ in range(2)]


@pytest.fixture
def url(tmp_path: Path, folder: Path, servers: list[str]) -> Iterator[str]:
    """A gateway over both."""
    with gateways(tmp_path) as start:
        yield start(*servers, "--model-name", "policy", "--tokenizer", str(folder)).url


def worker(url: str, **settings: Any) -> Any:
    return async_rollout_worker.AsyncRolloutWorker(
        **{
            "model_name": "policy",
            "vllm_server_url": url,
            "dataset": trl_training.data(),
            "reward_funcs": [trl_training.digits],
            "processing_class": trl_training.tokenizer(),
            "eos_token_ids": trl_training.model().generation_config.eos_token_id,
            "num_generations": GROUP,
            "max_inflight_tasks": 32,
            # No more than a pipe holds: at its end, the worker waits until its samples are read.
            "queue_maxsize": 8,
            "max_tokens": LENGTH,
            **settings,
        }
    )


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker wants the package vllm to be there. It does not use it."""
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)


async def sampled(addresses: list[str]) -> list[int]:
    async with Fleet(addresses) as fleet:
        return [info.sampled_tokens for info in (await fleet.info()).values()]


def test_tokens_are_those_that_grpc_brings(servers: list[str], url: str) -> None:
    PartialState()  # a trainer's, without which the worker does not log
    rollouts = worker(url, temperature=0.0)
    try:
        rollouts.start()
        samples = [rollouts.rollout_buffer.get(timeout=60) for _ in range(4 * GROUP)]
        rollouts.check_health(60)
    finally:
        rollouts.stop()
    tokenizer = trl_training.tokenizer()
    with SyncFleet(servers) as fleet:
        for sample in samples:
            prompt = tokenizer.apply_chat_template(
                sample.prompt, add_generation_prompt=True, return_dict=False
            )
            count = len(prompt)
            assert sample.input_ids[:count].tolist() == prompt
            ((direct,),) = fleet.generate_many(
                [prompt], Sampling(max_new_tokens=LENGTH, temperature=0.0)
            )
            assert sample.input_ids[count:].tolist() == list(direct.token_ids)
            assert sample.completion_mask.tolist() == [0] * count + [1] * len(direct.token_ids)
            assert sample.old_log_probs[count:].tolist() == pytest.approx(direct.logprobs, abs=1e-5)


def test_the_trainer_learns_and_log_probabilities_are_its_own(
    folder: Path, servers: list[str], url: str, tmp_path: Path
) -> None:
    args = AsyncGRPOConfig(
        str(tmp_path / "out"),
        max_steps=4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        learning_rate=3e-3,
        token_budget=0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        disable_tqdm=True,
    )
    tokenizer, dataset = trl_training.tokenizer(), trl_training.data()
    weights = AsyncRollouts(  # as a transfer of weights only
        SyncFleet(servers),
        args=args,
        dataset=dataset,
        reward_funcs=trl_training.digits,
        processing_class=tokenizer,
    )
    trainer = AsyncGRPOTrainer(
        model=str(folder),
        reward_funcs=trl_training.digits,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=worker(url),
        weight_transfer=weights,
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert len(log) == 4
    # All tokens of the first step are of the policy that the trainer published first.
    assert log[0]["ratio"] == pytest.approx(1, abs=1e-6)
    assert log[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert log[0]["rollout/generated_tok_s"] > 0
    assert weights.version == 4  # of five policies
    assert min(asyncio.run(sampled(servers))) > 0
