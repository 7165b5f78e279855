"""What to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What to run.

    Attributes:
        seed: Of the policy, the task and every draw.
        servers: How many rollout servers.
        steps: The trainer gives up after so many.
        minutes: Or after so long.
        output: The folder for the plot, the checkpoint and the servers' logs; it exists.
    """

    seed: int = 0
    servers: int = 2
    steps: int = 400
    minutes: float = 10.0
    output: Path = Path("demo-output")
