"""A fleet behind one name, with TLS: certificates must say the name, whatever it resolves to."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Credentials, Fleet, Timeouts, UnavailableError
from support.certificates import Authority
from support.synthetic import PROMPT, sampling, start_synthetic

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import StartServer

NAME = "rollouts.example"


async def test_certificates_say_the_fleet_s_name(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    own = authority.sign("server")  # for 127.0.0.1 and localhost
    server = start_synthetic(
        start_server, 0, "--tls-cert", str(own.certificate), "--tls-key", str(own.key)
    )
    port = int(server.address.rpartition(":")[2])
    real = socket.getaddrinfo

    def resolve(host: str, *more: object, **named: object):
        if host in {NAME, "localhost"}:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        return real(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    trusting = Credentials(ca=authority.certificate)
    async with Fleet(f"dns:///localhost:{port}", credentials=trusting) as fleet:
        assert (await fleet.generate(PROMPT, sampling(1, 5))).servers == (server.address,)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1"):
        async with Fleet(f"dns:///{NAME}:{port}", credentials=trusting, timeouts=Timeouts(start=1)):
            pass
    told = Credentials(ca=authority.certificate, server_name="localhost")
    async with Fleet(f"dns:///{NAME}:{port}", credentials=told) as fleet:
        assert (await fleet.generate(PROMPT, sampling(1, 5))).complete
