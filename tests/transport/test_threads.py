"""How soon threads take turns while weights move."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from rollwire_transport._concurrency import SWITCH_SECONDS, fast_thread_switching

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=2e-6)  # Python keeps microseconds


@pytest.mark.parametrize("before", [0.005, 0.0001])
def test_it_is_as_before_once_the_last_has_left(before: float) -> None:
    sys.setswitchinterval(before)
    during = near(min(SWITCH_SECONDS, before))
    first, second = fast_thread_switching(), fast_thread_switching()
    first.__enter__()
    assert sys.getswitchinterval() == during
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == during
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == near(before)


def test_what_fails_restores_it_too() -> None:
    sys.setswitchinterval(0.005)
    with pytest.raises(OSError, match="gone"), fast_thread_switching():
        raise OSError("gone")
    assert sys.getswitchinterval() == near(0.005)
