"""A trainer that does not wait for the longest rollouts.

It starts more groups than it needs. Unfinished groups are carried to the next step, where they
continue under the new policy.

    rollwire-server --model builtin:tiny --listen 127.0.0.1:50051 --log-level warning &
    rollwire-server --model builtin:tiny --listen 127.0.0.1:50052 --log-level warning &
    python examples/oversample.py

Policy, loss and toy task are those of train.py; here a rollout ends at a stop token. When it is
started again, it continues with the policy and with the groups that were under way.
"""

import argparse
import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from rollwire_client import (
    Batch,
    Batcher,
    Carry,
    Fleet,
    Prompt,
    Publisher,
    Sampling,
    Trajectory,
    append_groups,
)
from train import GROUP, PROMPTS, learn, load, reward
from transformers.utils import logging

SAMPLING = Sampling(max_new_tokens=256, stop_token_ids=range(500, 512))


def prompts(first: int) -> Iterator[Prompt]:
    """A data set; the same prompt has the same number in every run."""
    for number in itertools.count(first):
        generator = torch.Generator().manual_seed(number)
        yield Prompt(str(number), torch.randint(500, (16,), generator=generator))


def scored(_: Prompt, trajectory: Trajectory) -> float:
    """The reward of a sample, once it is complete."""
    return reward(trajectory)


def summary(batch: Batch) -> str:
    """What the batch has, and what it left out."""
    versions = sorted({version for group in batch.groups for version in group.versions})
    text = f"version {batch.version}: reward {batch.finished.mean_reward:.3f}, "
    text += f"{batch.finished.mean_length:.0f} tokens a rollout, of versions {versions}"
    return (
        f"{text}; {len(batch.carried.groups)} groups carried, {len(batch.dropped.groups)} dropped"
    )


async def train(servers: list[str], folder: Path, steps: int) -> None:
    """Trains for some steps, one version each."""
    model = load(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    buffer = folder / "buffer"
    async with (
        Fleet(servers) as fleet,
        Batcher(
            fleet, seed=0, group_size=GROUP, sampling=SAMPLING, reward=scored, max_lag=3
        ) as batcher,
    ):
        if buffer.exists():
            batcher.load(buffer)
        source = prompts(batcher.taken)
        publisher = Publisher(fleet)
        first = (await fleet.newest_version() or 0) + 1
        for version in range(first, first + steps):
            handle = await publisher.publish(version, model.state_dict())
            await handle.committed
            batch = await batcher.collect(source, PROMPTS, over_sample=1.5, tail=Carry())
            print(summary(batch), flush=True)
            samples = [sample for group in batch.groups for sample in group.samples]
            await asyncio.to_thread(
                learn,
                model,
                optimizer,
                [sample.trajectory for sample in samples],
                torch.tensor([sample.reward for sample in samples]),
            )
            # One checkpoint: the policy, and what is under way.
            model.save_pretrained(folder / "model")
            batcher.save(buffer)
            # To look at: rollwire view run/samples.jsonl
            groups = [*batch.groups, *batch.dropped.groups]
            await asyncio.to_thread(append_groups, folder / "samples.jsonl", groups)


if __name__ == "__main__":
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", nargs="+", default=["127.0.0.1:50051", "127.0.0.1:50052"])
    parser.add_argument("--folder", type=Path, default=Path("run"), help="keeps the run")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    asyncio.run(train(options.servers, options.folder, options.steps))
