"""What the HTTP gateway costs: tokens a second beside gRPC's, and its own CPU-seconds.

The synthetic engine samples every sequence at a set rate, as a GPU would; its tokens come by gRPC,
and through a gateway as one JSON a sequence, as events of token ids, and as events of text. The
clients of the gateway are raw sockets that parse nothing but the last line, so that what is
measured is the gateway.

The peer is the same engine behind an HTTP server of its own (``sse.py``), which sends one JSON
event for each token, as inference servers do. Its CPU-seconds are without those of the engine,
which is also run alone. A second gateway sends as many events as the peer (``--stream-interval
0``).

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import delivery
from rollwire_client import Fleet, Sampling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

PROMPT = [1, 2, 3]
ROLLWIRE = "from rollwire_client._cli import main; main()"


@contextlib.contextmanager
def gateway(server: str, folder: Path, tokenizer: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """Its address and its process's id."""
    ready = folder / f"gateway{''.join(flags)}.json"
    command = [sys.executable, "-c", ROLLWIRE, "gateway", server, "--listen", "127.0.0.1:0"]
    command += ["--ready-file", str(ready), "--tokenizer", str(tokenizer), *flags]
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


@dataclass(frozen=True)
class Figures:
    """Tokens a second, and CPU-seconds of the process that answers."""

    rate: float
    cpu_seconds: float


@dataclass(frozen=True)
class Gateway:
    """A gateway that runs."""

    address: str
    pid: int

    async def answer(self, path: str, body: dict[str, Any], options: argparse.Namespace) -> Figures:
        """All requests at once."""
        before = delivery.cpu_seconds(self.pid)
        seconds = await by_http(self.address, path, body, options.streams)
        tokens = options.streams * options.tokens
        return Figures(tokens / seconds, delivery.cpu_seconds(self.pid) - before)


async def by_peer(address: list[object], pid: int, options: argparse.Namespace) -> Figures:
    """From the peer; its CPU-seconds without those of the engine."""
    tokens = options.streams * options.tokens
    alone = await delivery.engine_alone(options.streams, options.tokens, options.rate)
    costs = await delivery.sent_as_events(address, pid, options.streams, options.tokens)
    return Figures(tokens / costs.seconds, tokens * (costs.server - alone))


async def measure(
    options: argparse.Namespace,
    server: str,
    usual: Gateway,
    each_token: Gateway,
    peer: tuple[list[object], int],
) -> None:
    """Prints a line for each way."""
    params = {"max_tokens": options.tokens, "seed": "SEED"}
    ids = {"token_ids": PROMPT, "sampling_params": params}
    events = {**ids, "stream": True}
    text = {"prompt": PROMPT, **params, "stream": True, "return_token_ids": True}
    generate, completions = "/inference/v1/generate", "/v1/completions"
    ways: dict[str, Callable[[], Awaitable[Figures]]] = {
        "token ids, one JSON": lambda: usual.answer(generate, ids, options),
        "token ids, events": lambda: usual.answer(generate, events, options),
        "text and ids, events": lambda: usual.answer(completions, text, options),
        "token ids, an event a token": lambda: each_token.answer(generate, events, options),
        "peer: token ids, an event a token": lambda: by_peer(*peer, options),
    }
    tokens = options.streams * options.tokens
    rates = [tokens / await by_grpc(server, options) for _ in range(options.runs)]
    grpc = statistics.median(rates)
    rows = [["way", "tokens/s", "of gRPC's", "CPU-s", "tokens a CPU-s"]]
    rows.append(["gRPC", f"{grpc:,.0f}", "1.00", "", ""])
    for way, run in ways.items():
        runs = [await run() for _ in range(options.runs)]
        rate = statistics.median(one.rate for one in runs)
        used = statistics.median(one.cpu_seconds for one in runs)
        # On a busy machine the engine alone can cost more than the peer with it.
        each = f"{tokens / used:,.0f}" if used > 0 else "noise"
        rows.append([way, f"{rate:,.0f}", f"{rate / grpc:.2f}", f"{used:.2f}", each])
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
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(
        f"{common.machine('cpu')}, {load}, {options.streams} streams, {options.tokens} tokens each"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer = write_tokenizer(folder / "tokenizer")
        sse = [str(Path(__file__).parent / "sse.py"), str(options.streams), str(options.rate)]
        sse += [str(folder / "sse.json")]
        with (
            common.servers([flags], folder) as (server,),
            gateway(server, folder, tokenizer) as usual,
            gateway(server, folder, tokenizer, "--stream-interval", "0") as each_token,
            delivery.process(sse, folder / "sse.json") as peer,
        ):
            asyncio.run(measure(options, server, Gateway(*usual), Gateway(*each_token), peer))


if __name__ == "__main__":
    main()
