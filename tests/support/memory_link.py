"""A link within one thread: what was sent is kept until it is received."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from rollwire_transport import Link, Transfer, TransportError
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Transfer(Transfer):
    def __init__(self, link: MemoryLink, act: Callable[[], None]) -> None:
        self._link = link
        self._act = act

    def wait(self, timeout: float) -> None:
        self._link.in_flight -= 1
        self._act()


class MemoryLink(Link):
    """Both ends of a group of two: first all is sent, then received.

    A bucket is copied when its transfer is waited for, not before, so that whoever touches the
    memory too early is found out.

    Args:
        capacity: Buckets until rank 1 dies.

    Attributes:
        messages: Headers and payloads that were sent and not received yet.
        given: Where payloads were to be received.
        most_in_flight: How many transfers were under way at once.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.messages: deque[tuple[Tensor, Tensor]] = deque()
        self.in_flight = 0
        self.most_in_flight = 0
        self.aborted = False
        self.finished = False
        self.given: list[Tensor] = []
        self._capacity = capacity

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        def act() -> None:
            if len(self.messages) == self._capacity:
                raise TransportError("it died", 1)
            self.messages.append((header.clone(), payload.clone()))

        return self._begin(act)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        def act() -> None:
            if not self.messages:
                raise TransportError("it died", 0)
            its_header, its_payload = self.messages.popleft()
            header.copy_(its_header)
            payload.copy_(its_payload)

        self.given.append(payload)
        return self._begin(act)

    def offers(self, answers: Mapping[int, bytes]) -> dict[int, bytes]:
        raise NotImplementedError

    def connect(self, timeout: float, offer: bytes = b"") -> None:
        pass

    def finish(self) -> None:
        self.finished = True  # and no transfer is counted: it is both ends

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> bool:
        return True

    def _begin(self, act: Callable[[], None]) -> Transfer:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return _Transfer(self, act)
