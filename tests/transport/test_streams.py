"""Work for another thread, on a device of which the trainer goes on to ask other things."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rollwire_transport import on_side_stream

LONG = 1 << 33  # clock cycles, some five seconds
SECONDS = 60


def test_without_a_gpu_it_is_the_work_itself() -> None:
    def work() -> None: ...

    assert on_side_stream(None, work) is work
    assert on_side_stream(torch.device("cpu"), work) is work


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_it_comes_after_what_was_asked_before_and_waits_for_nothing_else() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1, device=device)
        torch.cuda._sleep(LONG >> 7)
        tensor.fill_(1)
        work = on_side_stream(device, lambda: (torch.cuda.current_device(), tensor.item()))
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        torch.cuda._sleep(LONG)
        later = torch.cuda.current_stream(device).record_event()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result(SECONDS) == (device.index, 1)
    assert not later.query()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_what_it_asked_for_is_done_when_it_ends() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)

    def work() -> torch.cuda.Event:
        torch.cuda._sleep(LONG >> 7)
        return torch.cuda.current_stream(device).record_event()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(on_side_stream(device, work)).result(SECONDS).query()
