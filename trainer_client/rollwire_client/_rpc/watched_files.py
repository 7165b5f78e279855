"""Files of credentials, read again when they change."""

from __future__ import annotations

import errno
import logging
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Stamp = tuple[int, int, int]

logger = logging.getLogger(__name__)


class WatchedFiles:
    """The contents of files that belong together; the last good ones while they cannot be used.

    Args:
        paths: Of the files.
        check: Raises OSError or ValueError if they cannot be used.

    Attributes:
        contents: Of each.

    Raises:
        OSError, ValueError: They cannot be used.
    """

    def __init__(self, paths: Sequence[Path], check: Callable[[], None]) -> None:
        self._paths = paths
        self._check = check
        self._problem = ""
        self._stamps = self._now()
        self.contents = self._read()

    def refresh(self) -> bool:
        """Takes what they hold now, if that can be used; whether it has changed."""
        try:
            stamps = self._now()
            if stamps == self._stamps:
                return False
            contents = self._read()
            if self._now() != stamps:  # they are being written
                return False
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("files cannot be used, the last ones count: %s", error)
            return False
        self._problem = ""
        self._stamps = stamps
        before, self.contents = self.contents, contents
        return contents != before

    def _now(self) -> list[Stamp]:
        stats = [path.stat() for path in self._paths]
        return [(stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats]

    def _read(self) -> list[bytes]:
        contents = [path.read_bytes() for path in self._paths]
        for path, content in zip(self._paths, contents, strict=True):
            if not content.strip():
                raise OSError(errno.ENODATA, "it is empty", str(path))
        self._check()
        return contents


def check_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> None:
    """Raises OSError (ssl.SSLError is one) or ValueError unless the files are PEM, and key and
    certificate belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # what is strong enough, gRPC decides
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key, password=lambda: "")  # asks no terminal
    except ssl.SSLError as error:
        named = ", ".join(str(path) for path in (ca, certificate, key) if path is not None)
        raise ValueError(f"no PEM files that belong together: {named}: {error}") from error
