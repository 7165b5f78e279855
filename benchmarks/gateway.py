"""What the HTTP gateway costs: tokens a second beside gRPC's, and its own CPU-seconds.

The synthetic engine samples every sequence at a set rate, as a GPU would; its tokens come by gRPC,
and through a gateway as one JSON a sequence, as events of token ids, and as events of text. The
clients of the gateway are raw sockets that parse nothing but the last line, so that what is
measured is the gateway.

    python benchmarks/gateway.py --streams 256 --rate 50
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from rollwire_client import Fleet, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [1, 2, 3]
ROLLWIRE = "from rollwire_client._cli import main; main()"


@contextlib.contextmanager
def gateway(server: str, folder: Path, tokenizer: Path) -> Iterator[tuple[str, int]]:
    """Its address and its process's id."""
    ready = folder / "gateway.json"
    command = [sys.executable, "-c", ROLLWIRE, "gateway", server, "--listen", "127.0.0.1:0"]
    command += ["--ready-file", str(ready), "--tokenizer", str(tokenizer)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + common.START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the gateway did not start")
            time.sleep(0.1)
        yield json.loads(ready.read_text())["listen"], process.pid
    finally:
        common.ended(process)


def write_tokenizer(folder: Path) -> Path:
    """A token of each byte, and as many more."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"{a}{b}" for a in letters[:16] for b in letters[:16]]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    return folder


def cpu_seconds(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def by_grpc(server: str, options: argparse.Namespace) -> float:
    """Seconds that the streams take."""
    async with Fleet([server]) as fleet:

        async def read(seed: int) -> None:
            sampling = Sampling(max_new_tokens=options.tokens, seed=seed)
            count = 0
            async for chunk in fleet.stream(PROMPT, sampling):
                count += len(chunk.token_ids)
            assert count == options.tokens

        began = time.monotonic()
        await asyncio.gather(*map(read, range(options.streams)))
        return time.monotonic() - began


async def by_http(address: str, path: str, body: dict[str, Any], streams: int) -> float:
    """Seconds that the requests take."""
    host, _, port = address.rpartition(":")

    async def ask(seed: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
        asked = json.dumps(body).replace('"SEED"', str(seed)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        assert b'"finish_reason":"length"' in answer[-2000:], answer[-500:]

    began = time.monotonic()
    await asyncio.gather(*map(ask, range(streams)))
    return time.monotonic() - began


async def measure(options: argparse.Namespace, server: str, address: str, pid: int) -> None:
    """Prints a line for each way."""
    params = {"max_tokens": options.tokens, "seed": "SEED"}
    ids = {"token_ids": PROMPT, "sampling_params": params}
    text = {"prompt": PROMPT, **params, "stream": True, "return_token_ids": True}
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "token ids, one JSON": ("/inference/v1/generate", ids),
        "token ids, events": ("/inference/v1/generate", {**ids, "stream": True}),
        "text and ids, events": ("/v1/completions", text),
    }
    tokens = options.streams * options.tokens
    rates = [tokens / await by_grpc(server, options) for _ in range(options.runs)]
    grpc = statistics.median(rates)
    rows = [["way", "tokens/s", "of gRPC's", "CPU-s of the gateway", "tokens a CPU-s"]]
    rows.append(["gRPC", f"{grpc:,.0f}", "1.00", "", ""])
    for way, (path, body) in ways.items():
        runs = []
        for _ in range(options.runs):
            before = cpu_seconds(pid)
            seconds = await by_http(address, path, body, options.streams)
            runs.append((tokens / seconds, cpu_seconds(pid) - before))
        rate, used = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append(
            [way, f"{rate:,.0f}", f"{rate / grpc:.2f}", f"{used:.2f}", f"{tokens / used:,.0f}"]
        )
    common.print_table(rows)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50, help="tokens a second of each sequence")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    flags = ["--model", "none", "--engine", "synthetic", "--max-running", str(options.streams)]
    flags += ["--engine-arg", f"tokens-per-second={options.rate}"]
    print(f"{common.machine('cpu')}, {options.streams} streams, {options.tokens} tokens each")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer = write_tokenizer(folder / "tokenizer")
        with (
            common.servers([flags], folder) as (server,),
            gateway(server, folder, tokenizer) as (address, pid),
        ):
            asyncio.run(measure(options, server, address, pid))


if __name__ == "__main__":
    main()
