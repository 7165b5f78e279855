"""The smallest whole trainer: publish the policy, sample groups of rollouts, learn, again.

    rollwire-server --model builtin:tiny --listen 127.0.0.1:50051 --log-level warning &
    rollwire-server --model builtin:tiny --listen 127.0.0.1:50052 --log-level warning &
    python examples/train.py

The task is a toy: a token below 128 is worth 1, any other 0. The loop is real. It keeps the policy
in a folder, and continues from there when it is started again.
"""

import argparse
import asyncio
from pathlib import Path

import torch
from rollwire_client import Fleet, Publisher, Sampling, Trajectory
from rollwire_server import builtin_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

PROMPTS, GROUP = 8, 8  # prompts a step, and samples of each
SAMPLING = Sampling(max_new_tokens=32)


def load(folder: Path) -> PreTrainedModel:
    """The policy as the last run left it, or what the servers began with."""
    if folder.exists():
        return AutoModelForCausalLM.from_pretrained(folder)
    return builtin_model("builtin:tiny")  # or any checkpoint that the servers have, in their dtype


def reward(trajectory: Trajectory) -> float:
    """The share of tokens below 128."""
    return sum(token < 128 for token in trajectory.token_ids) / len(trajectory.token_ids)


def learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    trajectories: list[Trajectory],
    rewards: torch.Tensor,
) -> None:
    """One step of a policy gradient; a sample's advantage is its reward against its group's."""
    groups = rewards.view(PROMPTS, GROUP)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    parts = [trajectory.to_tensors() for trajectory in trajectories]
    token_ids = pad_sequence([part.token_ids for part in parts], batch_first=True)
    sampled = pad_sequence([part.logprobs for part in parts], batch_first=True)[:, 1:]
    mask = pad_sequence([part.mask for part in parts], batch_first=True)[:, 1:]
    logprobs = model(input_ids=token_ids[:, :-1]).logits.float().log_softmax(-1)
    current = logprobs.gather(-1, token_ids[:, 1:, None])[..., 0]
    gain = (current - sampled).exp() * advantages[:, None]  # ratio to the policy that sampled it
    optimizer.zero_grad()
    (-gain[mask].mean()).backward()
    optimizer.step()


async def train(servers: list[str], folder: Path, steps: int) -> None:
    """Trains for some steps, one version each."""
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    async with Fleet(servers) as fleet:
        publisher = Publisher(fleet)
        first = (await fleet.newest_version() or 0) + 1  # servers refuse a version that is not new
        for version in range(first, first + steps):
            handle = await publisher.publish(version, model.state_dict())
            report = await handle.committed  # raises if no server took it
            for server in report.failed:  # gets no rollouts until a later publish updates it
                print(f"{server.address} does not serve version {version}: {server.error}")

            prompts = torch.randint(model.config.vocab_size, (PROMPTS, 16)).repeat_interleave(
                GROUP, 0
            )
            trajectories = await asyncio.gather(
                *(
                    fleet.generate(prompt, SAMPLING, min_weight_version=version)
                    for prompt in prompts
                )
            )
            rewards = torch.tensor([reward(trajectory) for trajectory in trajectories])
            # In a thread, so that the event loop can watch the servers meanwhile.
            await asyncio.to_thread(learn, model, optimizer, trajectories, rewards)
            model.save_pretrained(folder)
            print(f"version {version}: reward {rewards.mean():.3f}", flush=True)


if __name__ == "__main__":
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", nargs="+", default=["127.0.0.1:50051", "127.0.0.1:50052"])
    parser.add_argument("--folder", type=Path, default=Path("policy"), help="keeps the policy")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    asyncio.run(train(options.servers, options.folder, options.steps))
