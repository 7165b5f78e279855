"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support import own

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for loopback."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._own = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
        self._name = name
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-subj", f"/CN={name}",
            "-keyout", self._own.key, "-out", self._own.certificate,
        )  # fmt: skip

    @property
    def certificate(self) -> Path:
        """Its own, which others trust."""
        return self._own.certificate

    def sign(self, name: str) -> Certificate:
        """A certificate for loopback, good for servers and clients."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=IP:127.0.0.1,IP:{own.host()},DNS:localhost\n")
        _openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", f"/CN={name}", "-keyout", made.key, "-out", request,
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", request, "-CA", self._own.certificate, "-CAkey", self._own.key,
            "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", made.certificate,
        )  # fmt: skip
        return made


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
