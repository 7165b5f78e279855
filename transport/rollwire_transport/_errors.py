"""What can go wrong in a transfer.

TransportError
├── TransportTimeout   a deadline passed
├── UnsuitableDevices  the backend does not serve members on these devices
└── DigestMismatch     the bytes that arrived are not those that were sent

A layout that cannot be used is a ManifestError, found before any byte moves. A source that fails to
give a tensor is a TensorSourceError, and no member's fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROBLEMS_SHOWN = 20


class TransportError(Exception):
    """The group cannot be used any more; what was received and verified so far is kept.

    Attributes:
        peer: The rank of the member that failed or is waited for, where it is known.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class TransportTimeout(TransportError):  # noqa: N818 - named for what happened
    """A member did not do its part before the deadline."""


class UnsuitableDevices(TransportError):  # noqa: N818 - named for what happened
    """The backend does not serve members on these devices; another backend may."""


class DigestMismatch(TransportError):  # noqa: N818 - named for what happened
    """A bucket's bytes do not have the digest in its header."""


class ManifestError(ValueError):
    """A manifest that cannot be used.

    Attributes:
        problems: All of them, one a line; the message shows the first ones.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        shown = self.problems[:_PROBLEMS_SHOWN]
        if more := len(self.problems) - len(shown):
            shown.append(f"and {more} more")
        super().__init__("; ".join(shown))


class TensorSourceError(Exception):
    """The source raised when it was asked for a tensor; what it raised is the cause.

    Attributes:
        tensor: Its name.
    """

    def __init__(self, tensor: str, error: BaseException) -> None:
        super().__init__(
            f"the source raised {type(error).__name__} when it was asked for {tensor}: {error}"
        )
        self.tensor = tensor
