"""verl's weights, which can be read once, as a source that a publish may read again."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from rollwire_client._errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from rollwire_client._publishing.tensors import TensorOrFunction


class RereadableWeights:
    """A callable source over an iterable of (name, tensor) that can be read once.

    A publish reads its source again when a server has died while weights were sent, and needs the
    tensors from the lowest bucket that another server misses. These were given last, so the last
    ``keep_bytes`` bytes of tensors are kept. If an older one is needed, that publish fails.

    Args:
        weights: What verl gives, the same names on all ranks.
        sizes: Bytes of each tensor on the servers, by name; None on ranks that send nothing.
        keep_bytes: Bytes of tensors to keep, as the servers have them; 0 on ranks that send
            nothing.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        sizes: Mapping[str, int] | None,
        keep_bytes: int,
    ) -> None:
        self._weights = iter(weights)
        self._sizes = sizes or {}
        self._keep_bytes = keep_bytes
        self._given: dict[str, Tensor | None] = {}  # None: it is no longer kept
        self._kept: deque[str] = deque()
        self._kept_bytes = 0

    def __call__(self) -> Iterator[tuple[str, TensorOrFunction]]:
        """All tensors from the first one on, as far as they are kept."""
        for name, kept in tuple(self._given.items()):
            yield name, _lost(name) if kept is None else kept
        for name, tensor in self._weights:
            self._keep(name, tensor)
            yield name, tensor

    def close(self) -> None:
        """Ends verl's generator, which may have something to do at its end. Idempotent."""
        self._forget()
        close: Callable[[], Any] | None = getattr(self._weights, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # it hangs, in a thread that was left behind
                close()

    def _keep(self, name: str, tensor: Tensor) -> None:
        if not self._keep_bytes:
            self._given[name] = None
            return
        self._given[name] = tensor
        self._kept.append(name)
        self._kept_bytes += self._size(name)
        while self._kept_bytes - self._size(self._kept[0]) >= self._keep_bytes:
            oldest = self._kept.popleft()
            self._kept_bytes -= self._size(oldest)
            self._given[oldest] = None

    def _size(self, name: str) -> int:
        if (kept := self._given[name]) is None:
            return 0
        return self._sizes.get(name, kept.nbytes)

    def _forget(self) -> None:
        self._given = dict.fromkeys(self._given)
        self._kept.clear()
        self._kept_bytes = 0


def _lost(name: str) -> Callable[[], Tensor]:
    def lost() -> NoReturn:
        raise SourceError(
            f"a server failed, and another one needs {name} again, which verl has given once and "
            "is not kept any more; nothing was committed, the servers keep what they serve"
        )

    return lost
