"""Threads that can be given up."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from rollwire_client.threads import in_thread


async def test_what_work_returns_or_raises() -> None:
    assert await in_thread(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_one_that_is_given_up_tells_nobody() -> None:
    given_up = in_thread(lambda: 1 // 0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up


def test_the_interpreter_does_not_wait_for_one_that_hangs() -> None:
    code = (
        "import asyncio, threading\n"
        "from rollwire_client.threads import in_thread\n"
        "async def main():\n"
        "    begun = threading.Event()\n"
        "    future = in_thread(lambda: (begun.set(), threading.Event().wait()))\n"
        "    await in_thread(begun.wait)\n"
        "    future.cancel()\n"
        "asyncio.run(main())\n"
        "print('over')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
