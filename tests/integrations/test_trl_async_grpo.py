"""TRL's own AsyncGRPOTrainer, sampling from two real servers."""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("trl", reason="TRL is in an environment of its own: make test-trl")

import torch
from peft import LoraConfig
from rollwire_client import Fleet, PublishError, Sampling
from rollwire_client.integrations.trl import AsyncRollouts
from rollwire_client.sync import SyncFleet
from support import trl_attention, trl_training
from support.servers import servers as start_servers
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.servers import ServerProcess

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, as the trainer wants the path of one."""
    made = tmp_path_factory.mktemp("policy")
    trl_training.model().save_pretrained(made)
    trl_training.tokenizer().save_pretrained(made)
    trl_attention.install()
    torch.set_num_threads(1)
    return made


@pytest.fixture(scope="module")
def processes(
    tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> Iterator[list[ServerProcess]]:
    with start_servers(tmp_path_factory.mktemp("servers")) as start:
        yield [start("--model", str(folder)), start("--model", str(folder))]


@pytest.fixture
def servers(processes: list[ServerProcess]) -> list[str]:
    return [process.address for process in processes]


class Run:
    """A trainer, and its rollouts."""

    def __init__(
        self, policy: Path, out: Path, servers: list[str], *, tools: list[Any] = (), **settings: Any
    ) -> None:
        peft_config = settings.pop("peft_config", None)
        rewards = settings.pop("reward_funcs", trl_training.digits)
        dataset = settings.pop("dataset", trl_training.data())
        timeout = settings.pop("callback_timeout", 60)
        self.args = AsyncGRPOConfig(
            str(out),
            **{
                "max_steps": 6,
                "per_device_train_batch_size": 16,
                "gradient_accumulation_steps": 1,
                "num_generations": 4,
                "max_completion_length": 24,
                "learning_rate": 3e-3,
                "token_budget": 0,
                "report_to": [],
                "save_strategy": "no",
                "use_cpu": True,
                "bf16": False,
                "activation_checkpointing": False,
                "disable_tqdm": True,
                **settings,
            },
        )
        tokenizer = trl_training.tokenizer()
        self.rollouts = AsyncRollouts(
            SyncFleet(servers),
            args=self.args,
            dataset=dataset,
            reward_funcs=rewards,
            processing_class=tokenizer,
            tools=tools,
            callback_timeout=timeout,
        )
        self.trainer = AsyncGRPOTrainer(
            model=str(policy),
            reward_funcs=trl_training.digits,
            args=self.args,
            train_dataset=trl_training.data(),
            processing_class=tokenizer,
            rollout_worker=self.rollouts,
            weight_transfer=self.rollouts,
            peft_config=peft_config,
        )

    def train(self) -> list[dict[str, Any]]:
        self.trainer.train()
        return [entry for entry in self.trainer.state.log_history if "ratio" in entry]


async def running(addresses: list[str]) -> int:
    """Sequences on the servers."""
    async with Fleet(addresses) as fleet:
        infos = (await fleet.info()).values()
        return sum(info.running_sequences + info.waiting_sequences for info in infos)


async def newest(addresses: list[str]) -> int:
    async with Fleet(addresses) as fleet:
        version = await fleet.newest_version()
        return -1 if version is None else version


def nothing_runs(addresses: list[str]) -> None:
    deadline = time.monotonic() + 30
    while asyncio.run(running(addresses)):
        assert time.monotonic() < deadline


def test_it_learns_from_sequences_that_cross_updates(
    folder: Path, servers: list[str], tmp_path: Path
) -> None:
    before = asyncio.run(newest(servers))
    run = Run(folder, tmp_path, servers, max_completion_length=200, max_inflight_tasks=64)
    log = run.train()
    # Of the first step, all tokens are the trainer's own policy's.
    assert log[0]["ratio"] == pytest.approx(1, abs=1e-6)
    assert log[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert any(entry["rollout/crossed_update_frac"] > 0 for entry in log)
    assert max(entry["sample/staleness_max"] for entry in log) >= 1
    assert run.rollouts.version == before + 7 == asyncio.run(newest(servers))
    nothing_runs(servers)


def marked(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of some of the tokens, in what is long enough."""
    return [sum(300 <= token < 340 for token in ids) / 24 for ids in completion_ids]


def test_adapters_are_merged_into_what_is_published(
    folder: Path, servers: list[str], tmp_path: Path
) -> None:
    """At the end of the training, the servers' log-probabilities are those of the merged model."""
    config = LoraConfig(r=4, target_modules="all-linear")
    run = Run(folder, tmp_path, servers, max_steps=3, max_staleness=0, peft_config=config)
    log = run.train()
    assert log[0]["ratio"] == pytest.approx(1, abs=1e-6)
    prompt = [5, 6, 7]
    with SyncFleet(servers) as fleet:
        ((sample,),) = fleet.generate_many([prompt], Sampling(max_new_tokens=20))
    merged = trl_training.model()
    untrained = logprobs(merged, prompt, sample.token_ids)
    merged.load_state_dict(copy.deepcopy(run.trainer.model).merge_and_unload().state_dict())
    assert logprobs(merged, prompt, sample.token_ids) == pytest.approx(sample.logprobs, abs=1e-5)
    assert untrained != pytest.approx(sample.logprobs, abs=1e-3)


def logprobs(model: Any, prompt: list[int], output: tuple[int, ...]) -> list[float]:
    tokens = torch.tensor([*prompt, *output])
    with torch.no_grad():
        found = model(input_ids=tokens[None, :-1]).logits[0].log_softmax(-1)
    return found.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0].tolist()


@pytest.mark.slow
def test_it_learns(folder: Path, servers: list[str], tmp_path: Path) -> None:
    run = Run(
        folder, tmp_path, servers, reward_funcs=marked,
        max_steps=60, per_device_train_batch_size=32, learning_rate=5e-3, queue_maxsize=16,
    )  # fmt: skip
    log = run.train()
    assert log[0]["ratio"] == pytest.approx(1, abs=1e-6)
    rewards = [entry["reward"] for entry in log]
    assert sum(rewards[-5:]) > 5 * sum(rewards[:5])


class TrainsAnother(TrainerCallback):
    """From the first step on, the model that is published is not the one that is trained."""

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 0:
            self.trainer.model = copy.deepcopy(self.trainer.model)


def test_a_policy_that_does_not_change_though_it_is_trained(
    folder: Path, servers: list[str], tmp_path: Path
) -> None:
    run = Run(folder, tmp_path, servers, max_steps=10)
    run.trainer.add_callback(TrainsAnother(run.trainer))
    with pytest.raises(PublishError, match="what is trained does not reach the servers"):
        run.train()
    assert run.trainer.state.global_step == 5
    nothing_runs(servers)


def test_a_policy_that_has_nothing_to_learn_may_stay_the_same(
    folder: Path, servers: list[str], tmp_path: Path
) -> None:
    def same(completions: list[Any], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    run = Run(folder, tmp_path, servers, max_steps=8, reward_funcs=same)
    assert len(run.train()) == 8


def test_a_clean_end_with_a_full_queue(folder: Path, servers: list[str], tmp_path: Path) -> None:
    threads = threading.active_count()
    run = Run(folder, tmp_path, servers, queue_maxsize=4, max_steps=2)
    full = threading.Event()

    class Waits(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 2:
                while not run.rollouts.rollout_buffer.full():
                    time.sleep(0.01)
                full.set()

    run.trainer.add_callback(Waits())
    run.train()
    assert full.is_set()
    assert run.rollouts.rollout_buffer.full()
    nothing_runs(servers)
    assert threading.active_count() <= threads + 1  # TRL's thread for traces
    with pytest.raises(RuntimeError, match="not under way"):
        run.rollouts.check_health(1)


def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: Any number.
    """
    if number % 2:
        raise ValueError("an odd number")
    return str(2 * number)


async def add(number: int) -> str:
    """Adds one.

    Args:
        number: Any number.
    """
    return str(number + 1)


def test_every_turn_of_a_conversation_with_tools_is_sampled_by_the_servers(
    folder: Path, servers: list[str], tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def reward(completions: list[Any], completion_ids: list[Any], **_: Any) -> list[float]:
        seen.extend(
            {"messages": messages, "ids": ids}
            for messages, ids in zip(completions, completion_ids, strict=True)
        )
        return trl_training.digits(completions)

    run = Run(
        folder, tmp_path, servers,
        tools=[double, add], max_steps=2, reward_funcs=reward, max_tool_calling_iterations=2,
    )  # fmt: skip
    log = run.train()
    # All turns of a conversation of the first step are the trainer's policy's.
    assert log[0]["ratio"] == pytest.approx(1, abs=1e-6)
    assert log[0]["tools/call_frequency"] > 0
    assert 0 < log[0]["tools/failure_frequency"] < 1
    said = [message for sample in seen for message in sample["messages"]]
    by_tools = [message["content"] for message in said if message["role"] == "tool"]
    assert "{'error': 'an odd number'}" in by_tools
    assert any(content.isdigit() for content in by_tools)
    replies = [[m for m in s["messages"] if m["role"] == "assistant"] for s in seen]
    assert max(len(messages) for messages in replies) == 3


def test_an_error_of_a_reward_function_ends_the_training(
    folder: Path, servers: list[str], tmp_path: Path
) -> None:
    def broken(**_: Any) -> list[float]:
        raise ZeroDivisionError("no reward")

    run = Run(folder, tmp_path, servers, reward_funcs=broken)
    with pytest.raises(RuntimeError, match=r"the reward function broken raised .*no reward"):
        run.train()
    nothing_runs(servers)


def test_a_tool_that_there_is_not(
    folder: Path, servers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its message says so, and the training goes on. The trainer's log has it."""
    run = Run(
        folder, tmp_path, servers,
        tools=[add], max_steps=1, max_tool_calling_iterations=1, log_completions=True,
    )  # fmt: skip
    (log,) = run.train()
    assert log["tools/failure_frequency"] > 0
    assert "unknown tool" in capsys.readouterr().out


@pytest.fixture
def sampling(folder: Path, servers: list[str], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts the rollouts of a trainer that does not train, with this reward function."""
    runs = []

    def start(reward: Any, **settings: Any) -> Run:
        runs.append(run := Run(folder, tmp_path, servers, reward_funcs=reward, **settings))
        run.rollouts.init_weight_transfer()
        run.rollouts.send_weights(run.trainer._streaming_iter())
        run.rollouts.update_model_version(1)
        run.rollouts.start()
        return run

    yield start
    for run in runs:
        run.rollouts.stop()
        run.rollouts.destroy()


def unhealthy(rollouts: AsyncRollouts, seconds: float) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            rollouts.check_health(seconds)
        except RuntimeError as error:
            return str(error)
        time.sleep(0.01)
    pytest.fail("it stayed healthy")


def test_a_reward_function_that_takes_too_long(sampling: Callable[..., Run]) -> None:
    done = threading.Event()

    def slow(**_: Any) -> list[float]:
        done.wait()
        return []

    run = sampling(slow, callback_timeout=0.2)
    try:
        assert "the reward function slow took more than 0.2 s" in unhealthy(run.rollouts, 60)
    finally:
        done.set()


def test_a_reward_function_that_blocks_the_event_loop(sampling: Callable[..., Run]) -> None:
    done = threading.Event()

    async def blocking(**_: Any) -> list[float]:
        done.wait()
        return [0.0] * 4

    run = sampling(blocking)
    try:
        assert "an async reward function or tool blocks it" in unhealthy(run.rollouts, 2)
    finally:
        done.set()


def test_rewards_and_what_is_left_unscored(sampling: Callable[..., Run]) -> None:
    async def some(completions: list[Any], **columns: Any) -> list[float | None]:
        assert columns["answer"] == [7] * 4
        return [None, 1.0, 2.0, 3.0]

    rows = [{"prompt": [{"role": "user", "content": "same"}], "answer": 7}] * 3
    run = sampling([some, trl_training.digits], dataset=rows)
    samples = [run.rollouts.rollout_buffer.get(timeout=60) for _ in range(16)]
    with pytest.raises(RuntimeError, match="have begun already"):
        run.rollouts.start()
    assert {sample.model_version for sample in samples} == {1}
    groups = [samples[start : start + 4] for start in range(0, 16, 4)]
    # Equal prompts are groups of their own, and so are those of the next pass.
    assert len({group[0].group_id for group in groups}) == 4
    for group in groups:
        assert len({tuple(sample.input_ids) for sample in group}) > 1
        assert group[0].metrics["rewards/some"] != group[0].metrics["rewards/some"]  # NaN
        assert group[3].metrics["rewards/some"] == 3
        assert group[3].advantage > group[1].advantage
        assert sum(sample.advantage for sample in group) == pytest.approx(0, abs=1e-5)


def test_a_server_dies_while_weights_are_sent(folder: Path, tmp_path: Path) -> None:
    """The iterator that TRL gives can be read only once; the other server gets all of it."""
    with start_servers(tmp_path) as start:
        both = [start("--model", str(folder)), start("--model", str(folder))]
        run = Run(folder, tmp_path / "out", [server.address for server in both])
        run.rollouts.init_weight_transfer()
        try:

            def killing() -> Iterator[tuple[str, torch.Tensor]]:
                for number, item in enumerate(run.trainer._streaming_iter()):
                    if number == 3:
                        both[0].kill()
                    yield item

            run.rollouts.send_weights(killing())
            assert run.rollouts.report is not None
            assert [s.address for s in run.rollouts.report.failed] == [both[0].address]
        finally:
            run.rollouts.destroy()


def test_what_servers_do_not_do_is_refused(folder: Path, tmp_path: Path) -> None:
    servers = ["127.0.0.1:5"]
    with pytest.raises(ValueError, match=r"repetition_penalty is 1\.1"):
        Run(folder, tmp_path, servers, repetition_penalty=1.1)
    with pytest.raises(ValueError, match="token_budget is None"):
        Run(folder, tmp_path, servers, token_budget=None)
    with pytest.raises(ValueError, match="no reward functions"):
        Run(folder, tmp_path, servers, reward_funcs=[])
    rollouts = Run(folder, tmp_path, servers).rollouts
    with pytest.raises(RuntimeError, match="not under way"):
        rollouts.check_health(1)
    rollouts.stop()
    rollouts.destroy()
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get_nowait()
