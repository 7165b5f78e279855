"""Synthetic servers: real processes at a set speed, whose tokens a test can foretell."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from typing import TYPE_CHECKING

from rollwire_client import RolloutClient, Sampling

from support.waiting import until as until

if TYPE_CHECKING:
    from rollwire_client import Fleet, Trajectory

    from support.servers import ServerProcess, StartServer

VOCABULARY = 512
PROMPT = [3, 1, 4]


def start_synthetic(start: StartServer, tokens_per_second: float, *flags: str) -> ServerProcess:
    """A server that samples every sequence at this rate, up to 512 side by side; 0: at any."""
    return start(
        "--model", "none", "--engine", "synthetic", "--log-level", "warning",
        "--engine-arg", f"tokens-per-second={tokens_per_second}", "--max-running", "512", *flags,
    )  # fmt: skip


def sampling(seed: int, tokens: int) -> Sampling:
    return Sampling(max_new_tokens=tokens, seed=seed)


async def undisturbed(server: ServerProcess, count: int, tokens: int) -> list[tuple[int, ...]]:
    """The outputs of seeds 0, 1, … on one server that nothing happens to."""
    async with RolloutClient(server.address) as client:
        trajectories = await asyncio.gather(
            *(client.generate(PROMPT, sampling(seed, tokens)) for seed in range(count))
        )
    return [trajectory.token_ids for trajectory in trajectories]


def labels_are_honest(trajectory: Trajectory, seed: int) -> bool:
    """Whether each token is the one that the weights of its label sample at its place."""
    return all(
        trajectory.token_ids[i] == _token(seed, i, segment.weights.digest)
        for segment in trajectory.segments
        for i in range(segment.start, segment.end)
    )


def _token(seed: int, position: int, digest: int) -> int:
    text = struct.pack("<QQQI", seed, position, digest, 0)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % VOCABULARY


async def sampled(fleet: Fleet, tokens: int) -> None:
    """Returns once the rollouts that were just started have so many tokens together."""
    await asyncio.sleep(0)
    begun = sum(member.outstanding_tokens for member in fleet._pool.servers)
    await until(lambda: sum(m.outstanding_tokens for m in fleet._pool.servers) <= begun - tokens)


async def each_sampled(fleet: Fleet, tokens: int) -> None:
    """Returns once each server has so many tokens of the rollouts that were just started."""
    await asyncio.sleep(0)
    left = {member: member.outstanding_tokens - tokens for member in fleet._pool.servers}
    await until(lambda: all(member.outstanding_tokens <= n for member, n in left.items()))
