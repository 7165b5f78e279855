"""What is said of a server that cannot be reached: which address was tried, why, what to do."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from rollwire_client import (
    Credentials,
    Fleet,
    RolloutClient,
    Sampling,
    ServerUnreachableError,
    Timeouts,
    UnavailableError,
)
from rollwire_client._cli.app import run
from support.certificates import Authority
from support.servers import servers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Web(http.server.BaseHTTPRequestHandler):
    """A web server; as a proxy it refuses."""

    def do_CONNECT(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@dataclass(frozen=True)
class Places:
    """What listens at which address, and credentials for it."""

    addresses: dict[str, str]
    credentials: dict[str, Credentials]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("unreachable")
    authority, strangers = Authority(folder), Authority(folder, "strangers")
    own, stranger = authority.sign("server"), strangers.sign("stranger")
    tls = ("--engine", "synthetic", "--tls-cert", str(own.certificate), "--tls-key", str(own.key))
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(servers(folder))
        web = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web))
        stack.callback(web.shutdown)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        nobody = stack.enter_context(socket.socket())
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        yield Places(
            addresses={
                "plain": start("--engine", "synthetic").address,
                "tls": start(*tls).address,
                "mutual": start(*tls, "--tls-client-ca", str(authority.certificate)).address,
                "web": f"127.0.0.1:{web.server_port}",
                "silent": f"127.0.0.1:{silent.getsockname()[1]}",
                "nobody": f"127.0.0.1:{nobody.getsockname()[1]}",
                "no name": "no-such-host.invalid:50051",
            },
            credentials={
                "none": Credentials(),
                "ca": Credentials(ca=authority.certificate),
                "other ca": Credentials(ca=strangers.certificate),
                "system": Credentials(tls=True),
                "other name": Credentials(ca=authority.certificate, server_name="else.example"),
                "stranger": Credentials(
                    ca=authority.certificate, certificate=stranger.certificate, key=stranger.key
                ),
            },
        )


@pytest.mark.parametrize(
    ("place", "credentials", "cause", "advice"),
    [
        ("nobody", "none", "Connection refused", "nothing listens there"),
        ("nobody", "ca", "Connection refused", "nothing listens there"),
        ("tls", "other ca", "CERTIFICATE_VERIFY_FAILED", r"check Credentials\(ca=…\)"),
        ("tls", "system", "CERTIFICATE_VERIFY_FAILED", r"check Credentials\(ca=…\)"),
        ("tls", "other name", "Hostname Verification", r"give Credentials\(server_name=…\)"),
        ("tls", "none", "Socket closed", "it may want TLS"),
        ("plain", "ca", "WRONG_VERSION_NUMBER", "TLS is not spoken there"),
        ("mutual", "ca", "Socket closed", r"Credentials\(certificate=…, key=…\)"),
        ("mutual", "stranger", "Socket closed", r"Credentials\(certificate=…, key=…\)"),
        ("web", "none", "Failed parsing HTTP/2", "check the port"),
        ("silent", "none", "timed out", "does not answer"),
        ("silent", "ca", "Endpoint closing", "does not answer"),
        ("no name", "none", "Domain name not found", "check the name"),
    ],
)
async def test_the_error_says_what_was_tried_why_and_what_to_do(
    places: Places, place: str, credentials: str, cause: str, advice: str
) -> None:
    address = places.addresses[place]
    client = RolloutClient(address, credentials=places.credentials[credentials])
    async with client:
        with pytest.raises(ServerUnreachableError) as caught:
            await client.info(timeout=20)
    tried = "errors resolving no-such" if place == "no name" else f"ipv4:{address}: "
    assert caught.match(rf"^{address}: cannot be reached: {tried}.*{cause}.* \(.*{advice}.*\)$")
    assert not str(caught.value).endswith("OK")


async def test_a_fleet_names_each_server(places: Places) -> None:
    fleet = Fleet(
        [places.addresses["nobody"], places.addresses["tls"]],
        credentials=places.credentials["other ca"],
        timeouts=Timeouts(start=1),
    )
    with pytest.raises(UnavailableError, match=r"refused.*; .*CERTIFICATE_VERIFY_FAILED"):
        await fleet.__aenter__()


def test_the_commands_say_the_same(places: Places, capfd: pytest.CaptureFixture[str]) -> None:
    ca = str(places.credentials["other ca"].ca)
    for command in (["info"], ["top"], ["generate", "--prompt-ids", "1", "--server"]):
        timeout = ["--timeout", "5" if "top" in command or "info" in command else "1"]
        assert run(["--tls-ca", ca, *command, places.addresses["tls"], *timeout]) == 1
        told = [line for line in capfd.readouterr().err.splitlines() if "rollwire: " in line]
        assert len(told) == 1
        assert "CERTIFICATE_VERIFY_FAILED" in told[0]
        assert "--tls-ca" in told[0]


def test_a_command_takes_a_server_s_name(places: Places, capfd: pytest.CaptureFixture[str]) -> None:
    ca = ["--tls-ca", str(places.credentials["ca"].ca)]
    address = places.addresses["tls"]
    assert run([*ca, "--tls-server-name", "localhost", "info", address]) == 0
    assert run([*ca, "--tls-server-name", "else", "info", address]) == 1
    assert "--tls-server-name" in capfd.readouterr().err


@pytest.mark.parametrize("credentials", ["none", "ca"])
async def test_a_proxy_in_the_environment_is_not_used(
    places: Places, credentials: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{places.addresses['nobody']}")
    address = places.addresses["plain" if credentials == "none" else "tls"]
    async with Fleet([address], credentials=places.credentials[credentials]) as fleet:
        assert await fleet.generate([1], Sampling(max_new_tokens=2))


@pytest.mark.parametrize(
    ("proxy", "cause"), [("nobody", "Connection refused"), ("web", "HTTP proxy returned.*403")]
)
async def test_a_proxy_that_is_asked_for_is_named(
    places: Places,
    proxy: str,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{places.addresses[proxy]}")
    address = places.addresses["plain"]
    told = f"{address}: cannot be reached: through the environment's proxy: "
    told += f"ipv4:{places.addresses[proxy]}: .*{cause}"
    async with RolloutClient(address, credentials=Credentials(use_proxy=True)) as client:
        with pytest.raises(ServerUnreachableError, match=told):
            await client.info()
    assert await asyncio.to_thread(run, ["--use-proxy", "info", address]) == 1
    assert "through the environment's proxy" in capfd.readouterr().err
