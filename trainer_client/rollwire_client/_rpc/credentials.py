"""How a client gets to servers: token and TLS, whose files are read again when they change."""

from __future__ import annotations

import errno
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Stamp = tuple[int, int, int]

logger = logging.getLogger(__name__)


class CredentialsError(ValueError):
    """Credentials that cannot be used, or would be given away."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a client authenticates to servers, verifies them, and connects to them.

    Files are read again when they change: the token file for the next call, TLS files for the next
    connection. While a file cannot be used (empty, half written, a key of another certificate) the
    last good content stays in effect, and the log warns.

    Attributes:
        token: Bearer token sent with every call, or a function that returns the current one.
            Publishing needs the servers' control token.
        token_file: File that holds the token, instead of ``token``.
        tls: Whether to connect by TLS. ``ca``, ``certificate``, ``key`` and ``server_name`` also
            turn it on.
        ca: File of the authorities (PEM) that sign servers. Default: the system's.
        certificate, key: Files of this client's own certificate (PEM), for mutual TLS.
        server_name: Name in the servers' certificate, if it is not the address's host.
        use_proxy: Connect through the HTTP proxy that the environment names (``grpc_proxy``,
            ``https_proxy``, ``http_proxy``; ``no_proxy``). Default: connect directly.

    Raises:
        CredentialsError: ``certificate`` or ``key`` alone, or both ``token`` and ``token_file``.
    """

    token: str | Callable[[], str] | None = field(default=None, repr=False)
    tls: bool = False
    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None
    use_proxy: bool = False
    token_file: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise CredentialsError("certificate and key belong together")
        if self.token is not None and self.token_file is not None:
            raise CredentialsError("give token or token_file, not both")

    @property
    def secure(self) -> bool:
        """Whether it is TLS."""
        return self.tls or bool(self.ca or self.certificate or self.server_name)

    @property
    def has_token(self) -> bool:
        """Whether it has a token."""
        return self.token is not None or self.token_file is not None


def current_token(credentials: Credentials) -> Callable[[], str] | None:
    """What gives the token that counts now; None without one."""
    if credentials.token_file is not None:
        file = WatchedFiles([Path(credentials.token_file)])

        def read() -> str:
            file.refresh()
            return file.contents[0].decode()

        return read
    token = credentials.token
    if token is None or callable(token):
        return token
    return lambda: token


class WatchedFiles:
    """The contents of files that belong together; the last good ones while they cannot be used.

    Args:
        paths: Of the files.
        check: Raises OSError or ValueError if they cannot be used.

    Attributes:
        contents: Of each.

    Raises:
        CredentialsError: They cannot be used.
    """

    def __init__(self, paths: Sequence[Path], check: Callable[[], None] = lambda: None) -> None:
        self._paths = paths
        self._check = check
        self._problem = ""
        try:
            self._stamps = self._now()
            self.contents = self._read()
        except OSError as error:
            raise CredentialsError(f"cannot read {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise CredentialsError(str(error)) from error

    def refresh(self) -> bool:
        """Reads them again if they changed; returns whether the contents have."""
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


class TlsFiles(WatchedFiles):
    def __init__(self, credentials: Credentials) -> None:
        files = (credentials.ca, credentials.certificate, credentials.key)
        ca, certificate, key = (None if file is None else Path(file) for file in files)
        self._given = [file is not None for file in files]
        super().__init__(
            [path for path in (ca, certificate, key) if path is not None],
            lambda: _check_tls(ca, certificate, key),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        contents = iter(self.contents)
        ca, certificate, key = (next(contents) if given else None for given in self._given)
        return grpc.ssl_channel_credentials(
            root_certificates=ca, private_key=key, certificate_chain=certificate
        )


def _check_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> None:
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
