"""Threads that can be given up."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import pytest
from client.scripted import until
from rollwire_client._concurrency import WorkerThread, run_in_thread


async def test_what_work_returns_or_raises() -> None:
    assert await run_in_thread(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt(), StopIteration(2)])
async def test_what_would_end_the_event_loop_is_an_error_of_the_work(raised: BaseException) -> None:
    def work() -> None:
        raise raised

    worker = WorkerThread("worker")
    for result in (run_in_thread(work), worker.submit(work).result):
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="it raised") as told:
                await result
        assert told.value.__cause__ is raised
    worker.close()


async def test_one_that_is_given_up_tells_nobody() -> None:
    given_up = run_in_thread(lambda: 1 // 0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up


def test_the_interpreter_does_not_wait_for_one_that_hangs() -> None:
    code = (
        "import asyncio, threading\n"
        "from rollwire_client._concurrency import run_in_thread\n"
        "async def main():\n"
        "    begun = threading.Event()\n"
        "    future = run_in_thread(lambda: (begun.set(), threading.Event().wait()))\n"
        "    await run_in_thread(begun.wait)\n"
        "    future.cancel()\n"
        "asyncio.run(main())\n"
        "print('over')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


async def test_a_worker_makes_its_calls_in_their_order_in_one_thread() -> None:
    worker = WorkerThread("worker")
    calls = [worker.submit(lambda n=n: (n, threading.current_thread())) for n in range(5)]
    results = [await call.result for call in calls]
    assert [number for number, _ in results] == list(range(5))
    assert len({thread for _, thread in results}) == 1
    with pytest.raises(ZeroDivisionError):
        await worker.submit(lambda: 1 // 0).result
    worker.close()


async def test_a_call_that_never_returns_is_left_with_its_thread() -> None:
    worker, for_ever = WorkerThread("worker"), threading.Event()
    stuck, taken_back, after = (
        worker.submit(for_ever.wait),
        worker.submit(lambda: pytest.fail("it was taken back")),
        worker.submit(lambda: "after"),
    )
    taken_back.result.cancel()
    await until(lambda: stuck.begun)
    worker.abandon(stuck, TimeoutError("too long"))
    with pytest.raises(TimeoutError, match="too long"):
        await stuck.result
    assert await after.result == "after"
    assert await worker.submit(lambda: "and so on").result == "and so on"
    assert not taken_back.begun
    for_ever.set()
    worker.close()


async def test_a_worker_that_is_closed_cancels_what_it_has_not_begun() -> None:
    worker, go_on = WorkerThread("worker"), threading.Event()
    first, second = worker.submit(go_on.wait), worker.submit(lambda: None)
    await until(lambda: first.begun)
    worker.close()
    go_on.set()
    assert second.result.cancelled()
    assert await first.result


async def test_a_worker_that_nobody_has_any_more_ends() -> None:
    worker = WorkerThread("forgotten")
    await worker.submit(lambda: None).result
    del worker
    gc.collect()
    await until(lambda: all(thread.name != "forgotten" for thread in threading.enumerate()))
