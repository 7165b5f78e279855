"""docs/debugging.md: every command is run, and says what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2

if TYPE_CHECKING:
    from support.servers import StartServer

ROOT = Path(__file__).parents[2]
GRPCURL = Path(sys.executable).with_name("grpcurl")
ADDRESS = "127.0.0.1:50051"


def examples() -> list[tuple[str, str]]:
    """Commands and what the page says they print, in their order."""
    page = (ROOT / "docs" / "debugging.md").read_text()
    shown = []
    for block in re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            shown.append((command, output.strip()))
    return shown


def fields() -> set[str]:
    """Of all messages of the API."""
    return {
        field.name
        for module in (common_pb2, rollout_pb2, weights_pb2)
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }


def likened(output: str) -> str:
    """Without what differs from server to server."""
    output = re.sub(r'"[0-9a-f]{32}"', '"ID"', output)
    output = re.sub(r'"digest": "\d+"', '"digest": "DIGEST"', output)
    return re.sub(r"-\d+\.\d+", "LOGPROB", output)


def test_the_page_shows_something() -> None:
    assert len(examples()) >= 10


def test_what_the_page_explains_is_in_the_api() -> None:
    page = (ROOT / "docs" / "debugging.md").read_text()
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`([a-z_]+)`", prose))
    assert "update_phase" in named
    assert named - {"rollwire", "list", "describe", "grpc_health_probe"} <= fields()


@pytest.mark.slow
def test_every_command_says_what_the_page_says(start_server: StartServer) -> None:
    server = start_server()
    for command, expected in examples():
        words = shlex.split(command.replace(ADDRESS, server.address))
        assert words[0] == "grpcurl"
        done = subprocess.run(
            [str(GRPCURL), *words[1:]], capture_output=True, text=True, timeout=30, check=False
        )
        said = (done.stdout + done.stderr).strip()
        assert likened(said) == likened(expected), command
        assert (done.returncode != 0) is expected.startswith("ERROR")
