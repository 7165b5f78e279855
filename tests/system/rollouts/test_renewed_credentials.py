"""Certificates and tokens are renewed on disk while a fleet is open: it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import pytest
from rollwire_client import (
    Credentials,
    Fleet,
    RefusedError,
    RolloutClient,
    Sampling,
    ServerUnreachableError,
)
from rollwire_client._rpc.channel import CredentialsError
from support.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import ServerProcess, StartServer

SAMPLING = Sampling(max_new_tokens=3)


class Secret:
    """A folder as Kubernetes mounts one, whose files are renewed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca, self.certificate, self.key = (
            folder / name for name in ("ca.crt", "tls.crt", "tls.key")
        )
        self._generation = 0
        self.renew()

    def renew(self) -> None:
        """Another authority, another certificate and key: nothing of before is trusted."""
        self._generation += 1
        authority = Authority(self._folder, f"authority{self._generation}")
        own = authority.sign(f"own{self._generation}")
        for file, source in (
            (self.ca, authority.certificate),
            (self.certificate, own.certificate),
            (self.key, own.key),
        ):
            replacement = file.with_suffix(".new")
            replacement.write_bytes(source.read_bytes())
            replacement.replace(file)

    def server_flags(self, *, mutual: bool) -> list[str]:
        flags = ["--tls-cert", str(self.certificate), "--tls-key", str(self.key)]
        return [*flags, "--tls-client-ca", str(self.ca)] if mutual else flags

    def credentials(self, *, mutual: bool) -> Credentials:
        if not mutual:
            return Credentials(ca=self.ca)
        return Credentials(ca=self.ca, certificate=self.certificate, key=self.key)


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    folder = tmp_path / "secret"
    folder.mkdir()
    return Secret(folder)


def start(start_server: StartServer, *flags: str) -> ServerProcess:
    return start_server("--engine", "synthetic", *flags)


@pytest.mark.parametrize("mutual", [False, True])
async def test_a_fleet_goes_on_after_a_renewal_and_a_restart(
    start_server: StartServer, secret: Secret, *, mutual: bool
) -> None:
    server = start(start_server, *secret.server_flags(mutual=mutual))
    credentials = secret.credentials(mutual=mutual)
    async with Fleet([server.address], credentials=credentials, probe_interval=0.1) as fleet:
        await fleet.generate([1], SAMPLING)
        for _ in range(2):
            secret.renew()
            await fleet.generate([1], SAMPLING)  # the connection that stands is kept
            server.kill()
            server = start(
                start_server, "--listen", server.address, *secret.server_flags(mutual=mutual)
            )
            async with asyncio.timeout(60):
                trajectory = await fleet.generate([1], SAMPLING)
            assert len(trajectory.token_ids) == 3


async def test_a_renewal_that_is_half_done_is_passed_over(
    start_server: StartServer, secret: Secret, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(start_server, *secret.server_flags(mutual=True))
    before = secret.key.read_bytes(), secret.ca.read_bytes()
    async with RolloutClient(server.address, credentials=secret.credentials(mutual=True)) as client:
        await client.info()
        secret.key.write_bytes(before[0][:40])
        secret.ca.write_bytes(b"")
        server.kill()
        with caplog.at_level(logging.WARNING, "rollwire_client"):
            for _ in range(3):
                with pytest.raises(ServerUnreachableError, match=r"refused|closed"):
                    await client.info()
                await asyncio.sleep(0)
        warnings = [r.getMessage() for r in caplog.records if "stays in effect" in r.getMessage()]
        assert len(warnings) == 1
        assert str(secret.ca) in warnings[0]
        secret.ca.write_bytes(before[1])
        secret.key.write_bytes(before[0])
        start(start_server, "--listen", server.address, *secret.server_flags(mutual=True))
        await reached(client)


@pytest.mark.slow
async def test_streams_on_a_connection_that_is_replaced_go_on(
    start_server: StartServer, secret: Secret
) -> None:
    server = start(
        start_server, *secret.server_flags(mutual=False),
        "--engine-arg", "tokens-per-second=100", "--drain-seconds", "30",
    )  # fmt: skip
    async with RolloutClient(
        server.address, credentials=secret.credentials(mutual=False)
    ) as client:
        stream = client.stream([1], Sampling(max_new_tokens=100))
        tokens = len((await anext(stream)).token_ids)
        secret.renew()
        server.process.terminate()  # it lets the stream end, and is reached by nobody else
        with contextlib.suppress(ServerUnreachableError):
            while True:
                await client.info()
        async for chunk in stream:
            tokens += len(chunk.token_ids)
        assert tokens == 100
        assert server.ended() == 0


async def reached(client: RolloutClient) -> None:
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(ServerUnreachableError):
                await client.info()
                return
            await asyncio.sleep(0.05)


async def test_a_token_file_is_read_again(start_server: StartServer, tmp_path: Path) -> None:
    held, own = tmp_path / "control", tmp_path / "trainer"
    for file in (held, own):
        file.write_text("first\n")
    server = start(start_server, "--control-token-file", str(held))
    async with RolloutClient(server.address, credentials=Credentials(token_file=own)) as client:
        await client.resume()
        held.write_text("second")
        with pytest.raises(RefusedError, match="UNAUTHENTICATED"):
            await client.resume()
        own.write_text("second")
        await client.resume()
        own.write_text("")  # being written
        await client.resume()
        own.unlink()
        await client.resume()


async def test_files_that_cannot_be_used_are_named_at_the_start(
    secret: Secret, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("no certificate")
    address = "127.0.0.1:9"
    for credentials in (
        Credentials(ca=wrong),
        Credentials(ca=secret.ca, certificate=secret.certificate, key=wrong),
        Credentials(ca=secret.ca, certificate=secret.ca, key=secret.key),
        Credentials(ca=tmp_path / "missing"),
        Credentials(token_file=tmp_path / "missing"),
    ):
        with pytest.raises(CredentialsError, match=str(tmp_path)):
            await RolloutClient(address, credentials=credentials).__aenter__()
    with pytest.raises(CredentialsError, match="not both"):
        Credentials(token="a", token_file=wrong)  # noqa: S106
