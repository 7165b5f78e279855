"""Work for another thread that uses a device, beside what this one goes on to do there.

A thread begins on the first device, and on the stream that all threads share. There a gather and a
collective of the trainer's own wait for each other in the order in which they were asked for; two
ranks that ask in different orders would wait for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def on_side_stream(device: torch.device | None, work: Callable[[], T]) -> Callable[[], T]:
    """``work`` on ``device``, on a stream of its own.

    What this thread has asked of its current stream so far is waited for there; what ``work`` asks
    is done when it returns.

    Args:
        device: Where it finds its tensors; on anything but CUDA this is ``work`` as it is.
        work: For any one thread, once.
    """
    if device is None or device.type != "cuda":
        return work
    current = torch.cuda.current_stream(device)
    asked = current.record_event()

    def there() -> T:
        stream = _take(current.device)
        stream.wait_event(asked)
        try:
            with torch.cuda.stream(stream):
                return work()
        finally:
            stream.synchronize()
            _idle[stream.device].append(stream)

    return there


# Used again: torch keeps memory for each stream apart.
_idle: dict[torch.device, list[torch.cuda.Stream]] = {}


def _take(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else uses."""
    try:
        return _idle.setdefault(device, []).pop()
    except IndexError:
        # What waits for other ranks must not hold up anybody. Torch hands out its few streams of
        # each priority in turn, and hardly anybody takes one of high priority.
        return torch.cuda.Stream(device, -1)  # type: ignore[no-untyped-call]
