"""A trainer whose rollouts are under way while it forks, as DataLoaders and pools do.

    python -m support.forking_trainer async|sync SERVER

It prints, as JSON: how many tokens each rollout brought; the exit codes of forked children; what
pools, loaders and commands brought; what children were told of what they tried.
"""

from __future__ import annotations

import grpc  # isort: skip - before the library, as a trainer's other imports may have it

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rollwire_client import Batcher, Fleet, Publisher, RolloutClient, Sampling
from rollwire_client.sync import SyncBatcher, SyncFleet, SyncPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

assert grpc.__version__
CHILDREN = 32
ROLLOUTS = 16
SAMPLING = Sampling(max_new_tokens=500)
HANGS = 20  # seconds; then a child is killed


def forked(act: Callable[[], object]) -> int:
    """The exit code of a forked child that does this."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(HANGS)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def told(tries: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """What a forked child gets for each."""
    reading, writing = os.pipe()

    def act() -> None:
        answers = {}
        for name, attempt in tries.items():
            try:
                answers[name] = f"returned {attempt()!r}"
            except BaseException as error:
                answers[name] = f"{type(error).__name__}: {error}"
        gc.collect()
        os.write(writing, json.dumps(answers).encode())

    code = forked(act)
    os.close(writing)
    with os.fdopen(reading) as answers:
        return json.loads(answers.read() or "{}") | {"exit code": str(code)}


def square(number: int) -> int:
    return number * number


def ways_to_fork() -> dict[str, object]:
    """What else forks: a pool, a command, and where torch is there a DataLoader."""
    command = [sys.executable, "-S", "-c", ""]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map(square, range(8))
    done = subprocess.run(command, preexec_fn=os.getpid, check=False)
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        loaded = list(range(8))
    else:
        data: Any = list(range(8))
        loaded = [int(item) for item in DataLoader(data, batch_size=None, num_workers=2)]
    return {"pool": squares, "command": done.returncode, "loader": loaded}


def children(*acts: Callable[[], object]) -> list[int]:
    """Exit codes of those that do this, and of many that end at once."""
    codes = [forked(act) for act in (gc.collect, *acts)]
    return codes + [forked(lambda: None) for _ in range(CHILDREN - len(codes))]


def run_sync(server: str) -> dict[str, object]:
    fleet = SyncFleet([server])
    with fleet, ThreadPoolExecutor(ROLLOUTS) as pool:
        under_way = [pool.submit(fleet.generate, [1], SAMPLING) for _ in range(ROLLOUTS)]
        begun = fleet.stream([1], SAMPLING)
        tokens = len(next(begun).token_ids)
        session, publisher = fleet.session([1]), SyncPublisher(fleet)
        batcher = SyncBatcher(fleet, seed=1)
        result: dict[str, object] = {
            "children": children(lambda: sys.exit(0)),
            "told": told(
                {
                    "generate": lambda: fleet.generate([1], SAMPLING),
                    "stream": lambda: next(fleet.stream([1], SAMPLING)),
                    "a stream that was begun": lambda: next(begun),
                    "info": fleet.info,
                    "newest_version": fleet.newest_version,
                    "session": lambda: fleet.session([1]),
                    "Session.generate": lambda: session.generate(SAMPLING),
                    "Session.stream": lambda: next(session.stream(SAMPLING)),
                    "Session.append": lambda: session.append([1]),
                    "Publisher.schema": publisher.schema,
                    "Publisher.prepare": publisher.prepare,
                    "Publisher.publish": lambda: publisher.publish(1, {}),
                    "Publisher.catch_up": lambda: publisher.catch_up({}),
                    "Batcher.collect": lambda: batcher.collect([], 1),
                    "Batcher.evaluate": lambda: batcher.evaluate([]),
                    "Batcher.save": lambda: batcher.save("/nowhere"),
                    "enter": fleet.__enter__,
                    "its own": lambda: SyncFleet([server]).__enter__(),
                    "close": fleet.close,
                    "exit": lambda: fleet.__exit__(None, None, None),
                }
            ),
            **ways_to_fork(),
        }
        tokens += sum(len(chunk.token_ids) for chunk in begun)
        result["tokens"] = [tokens, *(len(each.result().token_ids) for each in under_way)]
        batcher.close()
    return result


async def run_async(server: str) -> dict[str, object]:
    async with (
        Fleet([server]) as fleet,
        RolloutClient(server) as client,
        Batcher(fleet, seed=1) as batcher,
    ):
        under_way = [
            asyncio.create_task(who.generate([1], SAMPLING))
            for who in (fleet, client)
            for _ in range(ROLLOUTS // 2)
        ]
        await anext(fleet.stream([1], SAMPLING))  # the others are under way then, too
        session, publisher = fleet.session([1]), Publisher(fleet)

        def running(make: Callable[[], Any]) -> Callable[[], object]:
            async def run() -> object:
                return await make()

            return lambda: asyncio.run(run())

        tries = {
            "generate": lambda: fleet.generate([1], SAMPLING),
            "stream": lambda: anext(fleet.stream([1], SAMPLING)),
            "info": fleet.info,
            "newest_version": fleet.newest_version,
            "Session.generate": lambda: session.generate(SAMPLING),
            "Session.stream": lambda: anext(session.stream(SAMPLING)),
            "RolloutClient.info": client.info,
            "RolloutClient.generate": lambda: client.generate([1], SAMPLING),
            "RolloutClient.stream": lambda: anext(client.stream([1], SAMPLING)),
            "RolloutClient.abort": lambda: client.abort(["a"]),
            "RolloutClient.abort_all": client.abort_all,
            "RolloutClient.pause": client.pause,
            "RolloutClient.resume": client.resume,
            "Publisher.schema": publisher.schema,
            "Publisher.prepare": publisher.prepare,
            "Publisher.publish": lambda: publisher.publish(1, {}),
            "Publisher.catch_up": lambda: publisher.catch_up({}),
            "Batcher.collect": lambda: batcher.collect([], 1),
            "Batcher.evaluate": lambda: batcher.evaluate([]),
            "enter": fleet.__aenter__,
            "its own": Fleet([server]).__aenter__,
            "its own client": RolloutClient(server).__aenter__,
            "close": fleet.close,
            "exit": lambda: fleet.__aexit__(None, None, None),
            "close, RolloutClient": client.close,
            "close, Batcher": batcher.close,
        }
        result: dict[str, object] = {
            "children": children(),
            "told": told(
                {
                    "session": lambda: fleet.session([1]),
                    **{name: running(make) for name, make in tries.items()},
                }
            ),
            **ways_to_fork(),
        }
        result["tokens"] = [len((await each).token_ids) for each in under_way]
    return result


if __name__ == "__main__":
    facade, address = sys.argv[1:]
    outcome = run_sync(address) if facade == "sync" else asyncio.run(run_async(address))
    sys.stdout.write(json.dumps(outcome) + "\n")
