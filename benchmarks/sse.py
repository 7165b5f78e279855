"""The peer of ``delivery.py``: tokens as server-sent events, an HTTP stream for each sequence.

A server of the same synthetic engine that sends one JSON event for each token of each sequence, as
the streaming endpoints of inference servers do, and a client that reads them; of the standard
library alone. Both are as cheap as that protocol lets them be: events hold what a trainer needs and
no more, connections are open before anything is measured, and nobody waits for a slow reader.

    python benchmarks/sse.py STREAMS RATE READY_FILE            the server, until SIGTERM
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollwire_server.engines.base import SamplingParams, SequenceSpec, Step
from rollwire_server.engines.synthetic import SyntheticConfig, SyntheticEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Events:
    """A Sink that tells each token to the connection of its sequence."""

    def __init__(self) -> None:
        self.streams: dict[int, tuple[asyncio.Transport, str]] = {}

    def on_step(self, step: Step) -> None:
        """See ``Sink``."""
        version = step.weights.version
        for key, token, logprob in zip(step.keys, step.token_ids, step.logprobs, strict=True):
            transport, name = self.streams[key]
            event = {"id": name, "token_id": token, "logprob": logprob, "weight_version": version}
            transport.write(b"data: %b\n\n" % json.dumps(event).encode())
        for end in step.ends:
            transport, name = self.streams.pop(end.key)
            event = {"id": name, "finish_reason": end.reason.value}
            transport.write(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(event).encode())
            transport.close()

    def on_failure(self, error: BaseException) -> None:
        """See ``Sink``."""
        raise SystemExit(f"the engine died: {error}")


class Connection(asyncio.Protocol):
    """One request of a client."""

    keys = itertools.count()

    def __init__(self, engine: SyntheticEngine, events: Events) -> None:
        self._engine = engine
        self._events = events
        self._received = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._received += data
        head, whole, body = self._received.partition(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or 0)
        if not whole or len(body) < length:
            return
        asked = json.loads(body)
        self._transport.write(HEAD)
        key = next(self.keys)
        self._events.streams[key] = self._transport, asked["request_id"]
        sampling = SamplingParams(asked["max_new_tokens"], seed=asked["seed"])
        self._engine.submit(SequenceSpec(key, tuple(asked["input_ids"]), sampling))


async def serve(streams: int, rate: float, ready: Path) -> None:
    """Runs the server until it is cancelled."""
    events = Events()
    config = SyntheticConfig("none", max_running_sequences=streams, tokens_per_second=rate)
    engine = SyntheticEngine(config)
    await engine.start("server", events)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(engine, events), "127.0.0.1", 0, backlog=streams
    )
    partial = ready.with_suffix(".partial")
    partial.write_text(json.dumps(server.sockets[0].getsockname()))
    partial.rename(ready)
    await server.serve_forever()


class Reading(asyncio.Protocol):
    """A client's stream: every token and its log-probability."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._in_body = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        self._transport = transport

    def ask(self, seed: int, tokens: int) -> None:
        """Sends the request."""
        asked = {"request_id": f"sequence-{seed}", "input_ids": [1, 2, 3], "seed": seed}
        body = json.dumps({**asked, "max_new_tokens": tokens}).encode()
        self._transport.write(
            b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._rest += data
        if not self._in_body:
            _, self._in_body, body = self._rest.partition(b"\r\n\r\n")
            if not self._in_body:
                return
            self._rest = body
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                said = json.loads(event[6:])
                if "token_id" in said:
                    self.token_ids.append(said["token_id"])
                    self.logprobs.append(said["logprob"])

    def connection_lost(self, _: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        if not self.ended.done():
            self.ended.set_result(None)


async def connected(address: Sequence[object], streams: int) -> list[Reading]:
    """So many open connections."""
    loop = asyncio.get_running_loop()
    host, port = address
    return [(await loop.create_connection(Reading, host, port))[1] for _ in range(streams)]


async def read(streams: list[Reading], tokens: int) -> int:
    """Asks for a sequence on each, and reads them all; how many tokens came."""
    for seed, stream in enumerate(streams):
        stream.ask(seed, tokens)
    await asyncio.gather(*(stream.ended for stream in streams))
    return sum(len(stream.token_ids) for stream in streams)


def main() -> None:
    """Runs the server, on the same event loop as a rollwire-server."""
    streams, rate, ready = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.Loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(streams, rate, ready))


if __name__ == "__main__":
    main()
