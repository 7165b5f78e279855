"""A program that ends while gloo still holds a message of an aborted link."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from support.gloo import group

STUCK_SECONDS = 2.0  # until gloo lets go of it
TEARING_DOWN_SECONDS = 3.0


class SlowToGo:
    """Makes the interpreter's end last long enough for the message's time to run out within it."""

    def __del__(self, sleep=time.sleep) -> None:
        sleep(TEARING_DOWN_SECONDS)


def main() -> None:
    header = torch.ones(4, dtype=torch.int64)
    there = torch.ones(1 << 28, dtype=torch.uint8)
    here = torch.zeros_like(there)
    with group() as (trainer, server), ThreadPoolExecutor(2) as pool:
        ends = [server.receive(header.clone(), here), trainer.send(header, there)]
        for end in ends:
            pool.submit(end.wait, STUCK_SECONDS)
        while not here[0]:
            time.sleep(0.001)
        trainer.abort()
    print("done", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
    slow = SlowToGo()
