"""How a gateway starts: over TLS, or with one line that says why it cannot."""

from __future__ import annotations

import math
import ssl
from typing import TYPE_CHECKING

import httpx
import pytest
from rollwire_client._gateway.answers import encoded, number
from support.certificates import Authority
from support.programs import rollwire

if TYPE_CHECKING:
    from pathlib import Path

    from support.gateways import StartGateway
    from support.servers import ServerProcess


async def test_https_and_tokens(
    server: ServerProcess, start_gateway: StartGateway, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    own, token = authority.sign("gateway"), tmp_path / "token"
    token.write_text("secret")
    gateway = start_gateway(
        server.address, "--listen-cert", str(own.certificate), "--listen-key", str(own.key),
        "--control-token-file", str(token),
    )  # fmt: skip
    trust = ssl.create_default_context(cafile=authority.certificate)
    async with httpx.AsyncClient(base_url=f"https://{gateway.address}", verify=trust) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/update_weights_from_disk", json={})).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        answer = await http.post("/update_weights_from_disk", json={}, headers=headers)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere cannot be loaded"),
        (["--listen-cert", "TOKEN"], "--listen-cert and --listen-key belong together"),
        (["--listen-cert", "TOKEN", "--listen-key", "TOKEN"], "cannot be used"),
        (["--rollout-token-file", "TOKEN"], "would leave weight updates open to all"),
        (
            ["--rollout-token-file", "TOKEN", "--control-token-file", "TOKEN"],
            "are the same: use two",
        ),
        (["--control-token-file", "TOKEN", "--listen", "0.0.0.0:0"], "travel unencrypted"),
        (["--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(flags: list[str], told: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    named = [str(token) if flag == "TOKEN" else flag for flag in flags]
    done = rollwire("gateway", "127.0.0.1:9", "--timeout", "0.2", *named)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("rollwire: ")
    assert told in line


def test_without_a_server_it_does_not_start() -> None:
    done = rollwire("gateway", "127.0.0.1:9", "--timeout", "0.2", "--listen", "127.0.0.1:0")
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr.splitlines()[-1]


def test_json_has_null_for_minus_infinity() -> None:
    assert encoded([number(-math.inf), number(-0.5)]) == b"[null,-0.5]"
