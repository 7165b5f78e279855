"""What both ends need to use tokens and TLS: files that may be renewed, and what is loopback."""

from __future__ import annotations

import errno
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Stamp = tuple[int, int, int]


class WatchedFiles:
    """The contents of files that belong together; the last good ones while they cannot be used.

    ``check`` gets the paths, and raises OSError or ValueError if they cannot be used. Where a
    path is None the content is empty.

    Raises:
        OSError, ValueError: They cannot be used.
    """

    def __init__(
        self, *paths: Path | str | None, check: Callable[..., None] = lambda *_: None
    ) -> None:
        self._paths = [None if path is None else Path(path) for path in paths]
        self._check = check
        self._problem = ""
        self._stamps = self._now()
        self.contents = self._read()

    def refresh(self) -> bool:
        """Reads them again if they changed; returns whether the contents have.

        Raises:
            OSError, ValueError: They cannot be used: once for each problem, as calls come often.
        """
        try:
            stamps = self._now()
            if stamps == self._stamps:
                return False
            contents = self._read()
            if self._now() != stamps:  # they are being written
                return False
        except (OSError, ValueError) as error:
            known, self._problem = self._problem, str(error)
            if self._problem == known:
                return False
            raise
        self._problem = ""
        self._stamps = stamps
        before, self.contents = self.contents, contents
        return contents != before

    def _now(self) -> list[Stamp]:
        stats = [path.stat() for path in self._paths if path is not None]
        return [(stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats]

    def _read(self) -> list[bytes]:
        contents = [b"" if path is None else path.read_bytes() for path in self._paths]
        for path, content in zip(self._paths, contents, strict=True):
            if path is not None and not content.strip():
                raise OSError(errno.ENODATA, "it is empty", str(path))
        self._check(*self._paths)
        return contents


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is on this machine alone."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
