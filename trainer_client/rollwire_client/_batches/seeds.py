"""The seeds of a group's samples."""

from __future__ import annotations

import hashlib
import json


def seed_of(run: int, prompt: str, epoch: int, member: int, refill: int = 0) -> int:
    """A 64-bit seed, different for each sample of a run, and the same whenever it is asked for.

    Args:
        run: The trainer's own seed.
        prompt: Its ``Prompt.id``.
        epoch: Which pass over the data.
        member: Which sample of the group.
        refill: How often the sample had to be begun anew.
    """
    text = json.dumps([run, prompt, epoch, member, refill]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
