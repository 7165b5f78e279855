"""Servers that want TLS and tokens, through the library and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import (
    Credentials,
    Fleet,
    Publisher,
    PublishError,
    Sampling,
    UnavailableError,
)
from support.certificates import Authority

if TYPE_CHECKING:
    from support.servers import ServerProcess, StartServer

TOKEN = "the-control-token"  # noqa: S105


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(start_server: StartServer, authority: Authority, tmp_path: Path) -> ServerProcess:
    """One that wants certificates of its callers, and a token."""
    own = authority.sign("server")
    (tmp_path / "control").write_text(TOKEN)
    (tmp_path / "rollout").write_text("the-rollout-token")
    return start_server(
        "--engine", "synthetic", "--tls-cert", str(own.certificate), "--tls-key", str(own.key),
        "--tls-client-ca", str(authority.certificate),
        "--control-token-file", str(tmp_path / "control"),
        "--rollout-token-file", str(tmp_path / "rollout"),
    )  # fmt: skip


def credentials(authority: Authority, token: str) -> Credentials:
    own = authority.sign("trainer")
    return Credentials(
        token=token, ca=authority.certificate, certificate=own.certificate, key=own.key
    )


async def test_rollouts_and_updates(server: ServerProcess, authority: Authority) -> None:
    async with Fleet([server.address], credentials=credentials(authority, TOKEN)) as fleet:
        before = await fleet.generate([1, 2], Sampling(max_new_tokens=5, seed=1))
        handle = await Publisher(fleet).publish(3, {"weight": torch.ones(1024)})
        assert (await handle.committed).failed == ()
        after = await fleet.generate([1, 2], Sampling(max_new_tokens=5, seed=1))
        assert [segment.weights.version for segment in after.segments] == [3]
        assert after.token_ids != before.token_ids


async def test_the_rollout_token_publishes_nothing(
    server: ServerProcess, authority: Authority
) -> None:
    current = "the-rollout-token"
    known = credentials(authority, "")
    own = Credentials(
        token=lambda: current, ca=known.ca, certificate=known.certificate, key=known.key
    )
    async with Fleet([server.address], credentials=own) as fleet:
        await fleet.generate([1, 2], Sampling(max_new_tokens=5))
        with pytest.raises(PublishError, match="PERMISSION_DENIED"):
            await Publisher(fleet).publish(3, {"weight": torch.ones(1024)})
        current = TOKEN
        await (await Publisher(fleet).publish(3, {"weight": torch.ones(1024)})).committed


@pytest.mark.parametrize("wrong", ["no TLS", "strangers"])
async def test_a_fleet_that_is_not_let_in(
    server: ServerProcess, authority: Authority, tmp_path: Path, wrong: str
) -> None:
    strangers = Authority(tmp_path, "strangers")
    own = Credentials() if wrong == "no TLS" else credentials(strangers, TOKEN)
    from rollwire_client import Timeouts

    with pytest.raises(UnavailableError, match=server.address):
        async with Fleet([server.address], credentials=own, timeouts=Timeouts(start=1)):
            pass


def test_credentials_are_not_given_away() -> None:
    assert TOKEN not in repr(Credentials(token=TOKEN))
    with pytest.raises(ValueError, match="belong together"):
        Credentials(certificate="a.pem")


async def test_a_token_does_not_travel_in_the_clear() -> None:
    with pytest.raises(ValueError, match=r"unencrypted to 192\.0\.2\.1:5"):
        async with Fleet(["192.0.2.1:5"], credentials=Credentials(token=TOKEN)):
            pass


def command(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("rollwire")), *arguments],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_command(server: ServerProcess, authority: Authority, tmp_path: Path) -> None:
    own = authority.sign("person")
    tls = ["--tls-ca", str(authority.certificate), "--tls-cert", str(own.certificate)]
    tls += ["--tls-key", str(own.key)]
    token = ["--token-file", str(tmp_path / "rollout")]
    code, said, _ = command(*tls, *token, "info", server.address)
    assert (code, "synthetic" in said) == (0, True)
    prompt = ["--server", server.address, "--prompt-ids", "1,2", "--max-new-tokens", "3"]
    code, said, _ = command(
        *tls, "generate", *prompt, ROLLWIRE_TOKEN_FILE=str(tmp_path / "rollout")
    )
    assert (code, len(said.split())) == (0, 3)
    code, _, complaint = command(*tls, "info", server.address)
    assert (code, "UNAUTHENTICATED" in complaint) == (1, True)
    code, _, complaint = command(*tls[:4], "info", server.address)
    assert (code, "--tls-key" in complaint) == (2, True)
