"""The Python of the README and of the guide for trainers runs as it is pasted."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet, Publisher
from rollwire_server import builtin_model
from support.programs import ran

if TYPE_CHECKING:
    from support.servers import StartServer

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "training.md")


def blocks(addresses: list[str]) -> list[str]:
    """The programs of both pages, with the addresses of real servers."""
    text = "".join(page.read_text() for page in PAGES)
    found = re.findall(r"```python\n(import .*?)```", text, re.DOTALL)  # not what is a part of one
    assert len(found) >= 5
    for told, real in zip(("127.0.0.1:50051", "127.0.0.1:50052"), addresses, strict=True):
        assert [code.count(told) for code in found] == [1] * len(found)
        found = [code.replace(told, real) for code in found]
    return found


@pytest.mark.slow
def test_what_a_trainer_says_to_servers(start_server: StartServer, tmp_path: Path) -> None:
    addresses = [start_server().address, start_server().address]
    code, *_ = blocks(addresses)
    for version in (1, 2):  # it can be run again
        done = ran("-c", code, cwd=tmp_path)
        assert done.stderr == ""
        *servers, last = done.stdout.splitlines()
        for address, line in zip(addresses, servers, strict=False):
            assert line.startswith(f"{address} WeightTag(version={version}, ")
        # The rollout is done, under the new policy if it was not faster than the publish.
        assert re.search(rf" 2000 ({version}|{version - 1 or None})$", last)


@pytest.mark.slow
def test_stop_strings_and_conversations(start_server: StartServer, tmp_path: Path) -> None:
    _, stop, _, conversations, _ = blocks([start_server().address, start_server().address])
    done = ran("-c", stop, cwd=tmp_path)
    assert done.stderr == ""
    string, count, text = done.stdout.split()
    whole = text + string
    assert string in {"x", "yes"}
    assert len(whole) == int(count)  # a token has one character here
    assert "x" not in text
    assert "yes" not in whole[:-1]
    done = ran("-c", conversations, cwd=tmp_path)
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4 * 8
    assert all(int(sampled) + 3 <= int(tokens) for tokens, sampled, _ in lines)


@pytest.mark.slow
def test_batches(start_server: StartServer, tmp_path: Path) -> None:
    addresses = [start_server().address, start_server().address]
    _, _, code, *_ = blocks(addresses)
    done = ran("-c", code, cwd=tmp_path)
    assert done.stderr == ""
    told = done.stdout.splitlines()
    assert [line.split()[0] for line in told] == ["0", "carried", "1", "carried", "2", "carried"]
    assert (tmp_path / "buffer").exists()


@pytest.mark.slow
def test_a_sharded_trainer(start_server: StartServer, tmp_path: Path) -> None:
    """Also where its ranks hear of different versions, as while servers start or are published to:
    here rank 1 asks only the first server.
    """
    addresses = [start_server().address, start_server().address]
    asyncio.run(publish(3, addresses[1]))
    *_, code = blocks(addresses)
    known = f'["{addresses[0]}", "{addresses[1]}"]'
    assert known in code
    (tmp_path / "sharded.py").write_text(code.replace(known, f"{known}[: 2 - ranks.rank]"))
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    done = ran(*torchrun, "--nproc-per-node", "2", "sharded.py", cwd=tmp_path)
    (report,) = done.stdout.splitlines()
    for address in addresses:
        assert f"address='{address}', weights=WeightTag(version=4, revision=" in report
    assert report.count("error=None") == 2


async def publish(version: int, address: str) -> None:
    async with Fleet([address]) as fleet:
        tensors = builtin_model("builtin:tiny").state_dict()
        await (await Publisher(fleet).publish(version, tensors)).committed
