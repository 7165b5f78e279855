"""What can go wrong between two ends of a transfer.

TransportError
├── TransportTimeout   a deadline ran out
├── SharedDevice       two members are on one GPU, and the backend wants one for each
└── DigestMismatch     the bytes that came are not those that were sent

A layout that cannot be used is a ``ManifestError`` (see ``checks``): found before any byte moves.
A source that fails at giving a tensor is a ``SourceError``, and no member's fault.
"""

from __future__ import annotations


class TransportError(Exception):
    """The group is unusable; what was received and verified so far is kept.

    Attributes:
        peer: The member that failed, as "rank 2", where it is known.
    """

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class TransportTimeout(TransportError):  # noqa: N818 - named for what happened
    """A member did not do its part before the deadline."""


class SharedDevice(TransportError):  # noqa: N818 - named for what happened
    """Two members are on one GPU, which the backend cannot serve; another one may."""


class DigestMismatch(TransportError):  # noqa: N818 - named for what happened
    """A bucket's bytes do not have the digest that its header tells."""


class SourceError(Exception):
    """The source failed when it was asked for a tensor; what it raised is the cause.

    Attributes:
        tensor: Its name.
    """

    def __init__(self, tensor: str, error: BaseException) -> None:
        super().__init__(
            f"the source raised {type(error).__name__} when it was asked for {tensor}: {error}"
        )
        self.tensor = tensor
