"""Runs the gateway: opens the fleet, listens, and ends gracefully after SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from rollwire.credentials import is_loopback

from rollwire_client._data import ServerInfo
from rollwire_client._errors import MissingDependencyError
from rollwire_client._gateway.app import create_app, create_metrics_app
from rollwire_client._gateway.gateway import Gateway
from rollwire_client._gateway.metrics import GatewayMetrics
from rollwire_client._gateway.security import BearerTokens
from rollwire_client._gateway.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from rollwire_client._fleet.fleet import Fleet
    from rollwire_client._gateway.gateway import GatewaySettings

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # connections that wait to be accepted
_FLUSH_SECONDS = 5  # for answers to be delivered at the end
_POLL = 0.01  # seconds


class GatewayStartError(Exception):
    """The gateway cannot start as its settings say; the message is for whoever starts it."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and to whom a gateway listens.

    Attributes:
        address: HOST:PORT of the API; port 0 picks one.
        metrics: HOST:PORT of the metrics; None: they are not shown.
        certificate, key: Files for TLS.
        rollout_token, control_token: Files with the bearer tokens.
        keep_alive: Seconds for which a connection without a request stays open: longer than the
            pools of clients keep it, or they would send on one that is being closed.
        drain: After SIGTERM, seconds for which requests under way may continue.
        ready_file: File to write the addresses to once it listens.
    """

    address: str
    metrics: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    rollout_token: Path | None = None
    control_token: Path | None = None
    keep_alive: float = 120.0
    drain: float = 30.0
    ready_file: Path | None = None


async def serve(fleet: Fleet, settings: GatewaySettings, listening: Listening) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        GatewayStartError: The settings are wrong.
        RollwireError: No server of the fleet answers.
    """
    tokens = _tokens(listening)
    tokenizer = await asyncio.to_thread(_load_tokenizer, settings)
    sockets = {
        name: _bind(address)
        for name, address in (("listen", listening.address), ("metrics", listening.metrics))
        if address is not None
    }
    metrics = GatewayMetrics()
    with contextlib.ExitStack() as stack:
        if tokenizer is not None:
            stack.callback(tokenizer.close)
        for listener in sockets.values():
            stack.enter_context(contextlib.closing(listener))
        async with fleet:
            names = settings.model_names or await _model_names(fleet)
            gateway = Gateway(fleet, settings, tokenizer, metrics, names)
            api = _server(create_app(gateway, tokens), listening, tls=True)
            servers = {"listen": api}
            if "metrics" in sockets:
                servers["metrics"] = _server(create_metrics_app(metrics), listening, tls=False)
            stopping = _stopping()
            async with asyncio.TaskGroup() as group:
                for name, server in servers.items():
                    group.create_task(server.serve(sockets=[sockets[name]]))
                await _started(servers.values(), stopping)
                _announce(listening, {n: _address(s) for n, s in sockets.items()})
                await stopping.wait()
                await _drain(gateway, listening.drain)
                for server in servers.values():
                    server.should_exit = True


async def _drain(gateway: Gateway, seconds: float) -> None:
    """Takes no new requests, lets those under way end, and ends the rest with an error."""
    gateway.draining = True
    logger.info("draining: requests under way have %g s", seconds)
    await gateway.sampler.close(seconds)


def _stopping() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


def _server(app: Any, listening: Listening, *, tls: bool) -> Any:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=listening.keep_alive,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        ssl_certfile=listening.certificate if tls else None,
        ssl_keyfile=listening.key if tls else None,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # signals are ours
    return server


async def _started(servers: Any, stopping: asyncio.Event) -> None:
    while not all(s.started for s in servers) and not stopping.is_set():  # noqa: ASYNC110
        await asyncio.sleep(_POLL)


def _announce(listening: Listening, addresses: dict[str, str]) -> None:
    for name, address in addresses.items():
        logger.info("%s: %s", name, address)
    if listening.ready_file is not None:
        ready = {"listen": addresses["listen"], "metrics_listen": addresses.get("metrics")}
        temporary = listening.ready_file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(ready))
        temporary.replace(listening.ready_file)


async def _model_names(fleet: Fleet) -> tuple[str, ...]:
    infos = (await fleet.info()).values()
    return tuple(dict.fromkeys(i.model for i in infos if isinstance(i, ServerInfo))) or ("policy",)


def _load_tokenizer(settings: GatewaySettings) -> ChatTokenizer | None:
    folder, renderer = settings.tokenizer, settings.renderer
    if folder is None:
        if renderer is not None:
            raise GatewayStartError("--renderer needs --tokenizer")
        return None
    try:
        return ChatTokenizer.load(folder, renderer)
    except MissingDependencyError:
        raise
    except Exception as error:
        what = f"--tokenizer {folder}" + (f" with --renderer {renderer}" if renderer else "")
        why = f"{type(error).__name__}: {error}"
        raise GatewayStartError(f"{what} cannot be loaded: {why}") from error


def _tokens(listening: Listening) -> BearerTokens:
    if (listening.certificate is None) != (listening.key is None):
        raise GatewayStartError("--listen-cert and --listen-key belong together")
    if listening.certificate is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(listening.certificate, listening.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise GatewayStartError(
                f"--listen-cert and --listen-key cannot be used: {error}"
            ) from error
    try:
        tokens = BearerTokens(listening.rollout_token, listening.control_token)
    except (OSError, ValueError) as error:
        raise GatewayStartError(str(error)) from error
    if tokens.used and listening.certificate is None and not is_loopback(listening.address):
        raise GatewayStartError(
            f"tokens would travel unencrypted to {listening.address}: give --listen-cert and "
            "--listen-key, or listen on a loopback address"
        )
    return tokens


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    name = host.removeprefix("[").removesuffix("]")
    try:
        family, _, _, _, bound = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0]
        both = family is socket.AF_INET6 and bound[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            bound[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise GatewayStartError(f"cannot listen on {address}: {error.strerror}") from error
    listener.setblocking(False)  # noqa: FBT003
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
