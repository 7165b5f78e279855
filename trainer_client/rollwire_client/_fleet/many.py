"""Several samples of each of many prompts, at once."""

from __future__ import annotations

import asyncio
import math
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from rollwire_client._arguments import integer
from rollwire_client._concurrency import cancel_all
from rollwire_client._errors import InvalidRequestError, RollwireError
from rollwire_client._fleet.rollout import QUEUE_FULL_DELAY, queue_was_full
from rollwire_client._rpc.conversion import checked_token_ids, generate_request
from rollwire_client._trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollwire_client._data import Sampling
    from rollwire_client._fleet.server_pool import ServerPool
    from rollwire_client._rpc.conversion import RolloutOptions
    from rollwire_client._trajectory import Trajectory

_OWN_OPTIONS = ("request_id", "session_id")
_AT_ONCE = 1024  # sequences: as many as a server takes in its queue


async def generate_many(
    pool: ServerPool,
    prompts: Iterable[Sequence[int]],
    sampling: Sampling,
    n: int,
    options: RolloutOptions,
) -> list[list[Trajectory]]:
    """See ``Fleet.generate_many``."""
    n = integer("n", n, minimum=1)
    if own := [name for name in _OWN_OPTIONS if name in options]:
        raise TypeError(f"{', '.join(own)}: each sequence has its own here, leave it out")
    prompt_ids = [_checked(index, prompt) for index, prompt in enumerate(prompts)]
    generate_request((), sampling, options)  # raises what is wrong with them
    slots = asyncio.Semaphore(_AT_ONCE)
    clock = asyncio.get_running_loop().time

    async def sample(number: int, output: TrajectoryBuilder, session: str) -> Trajectory:
        own: RolloutOptions = {**options, "session_id": session}
        seeded = sampling
        if sampling.seed is not None:
            seeded = replace(sampling, seed=(int(sampling.seed) + number) % (1 << 64))
        async with slots:
            ends_at = clock() + (options.get("timeout") or math.inf)
            while True:
                rollout = pool.rollout(output, seeded, own)
                try:
                    await rollout.run()
                    return output.trajectory()
                except RollwireError as error:
                    left = ends_at - clock() - QUEUE_FULL_DELAY
                    if not queue_was_full(error) or left <= 0:
                        error.add_note(f"It is of prompt {number // n}, sample {number % n}.")
                        raise
                await asyncio.sleep(QUEUE_FULL_DELAY)
                if left < math.inf:
                    own["timeout"] = left

    sessions = [uuid.uuid4().hex for _ in prompt_ids]
    tasks = [
        asyncio.create_task(
            sample(number, TrajectoryBuilder(prompt_ids[number // n]), sessions[number // n])
        )
        for number in range(n * len(prompt_ids))
    ]
    try:
        samples = await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
    return [list(samples[start : start + n]) for start in range(0, len(samples), n)]


def _checked(index: int, prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return checked_token_ids(prompt)
    except InvalidRequestError as error:
        message = f"prompts[{index}]: {error}"
        raise InvalidRequestError(message, violations={f"prompts[{index}]": message}) from error
