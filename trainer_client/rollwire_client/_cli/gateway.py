"""``rollwire gateway``: a fleet over HTTP."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import typer
from rollwire.types import LogprobBasis

from rollwire_client._cli import shared
from rollwire_client._errors import MissingDependencyError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._rpc.timeouts import Timeouts


def _file(what: str, name: str) -> Any:
    return typer.Option(
        name, exists=True, dir_okay=False, metavar="FILE", help=what,
        envvar=f"ROLLWIRE_GATEWAY_{name.strip('-').replace('-', '_').upper()}",
    )  # fmt: skip


def _listen(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{value!r} is not HOST:PORT; port 0 picks a free one")
    return value


def gateway(
    context: typer.Context,
    servers: shared.FleetServers,
    *,
    listen: Annotated[
        str, typer.Option(parser=_listen, metavar="HOST:PORT", help="Where to serve HTTP.")
    ] = "127.0.0.1:8000",
    metrics_listen: Annotated[
        str | None,
        typer.Option(parser=_listen, metavar="HOST:PORT", help="Where to show Prometheus metrics."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The model's tokenizer and chat template. Without it only endpoints of token ids "
            "work.",
        ),
    ] = None,
    renderer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The model's renderer of PyPI's `renderers`, such as qwen3: finds calls of tools.",
        ),
    ] = None,
    model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model in requests, repeatable. Default: the servers'."),
    ] = None,
    logprob_basis: Annotated[
        LogprobBasis, typer.Option(help="The distribution of log-probabilities.")
    ] = LogprobBasis.TEMPERATURE,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            resolve_path=True,
            help="Folder below which /update_weights_from_disk may read, repeatable.",
        ),
    ] = None,
    listen_cert: Annotated[
        Path | None, _file("Certificate chain (PEM): serves HTTPS.", "--listen-cert")
    ] = None,
    listen_key: Annotated[
        Path | None, _file("Private key of that certificate (PEM).", "--listen-key")
    ] = None,
    rollout_token_file: Annotated[
        Path | None,
        _file("Bearer token that clients need to sample.", "--rollout-token-file"),
    ] = None,
    control_token_file: Annotated[
        Path | None,
        _file("Bearer token that clients need to update weights.", "--control-token-file"),
    ] = None,
    max_sequences: Annotated[
        int, typer.Option(min=1, help="Most sequences at the same time.")
    ] = 4096,
    max_sequence_seconds: Annotated[
        float, shared.seconds_option("Longest time from a sequence's arrival to its last token.")
    ] = 3600.0,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest request.")] = 64 << 20,
    stream_interval: Annotated[
        float,
        shared.seconds_option(
            "Seconds for which tokens of a stream are collected into one event.", 0.0
        ),
    ] = 0.05,
    heartbeat_seconds: Annotated[
        float, shared.seconds_option("Seconds of silence after which a stream gets a comment.")
    ] = 10.0,
    keep_alive_seconds: Annotated[
        float, shared.seconds_option("Seconds for which an idle connection stays open.")
    ] = 120.0,
    drain_seconds: Annotated[
        float, shared.seconds_option("After SIGTERM, seconds for which requests may continue.", 0.0)
    ] = 30.0,
    ready_file: Annotated[
        Path | None, typer.Option(help="File to write the addresses to, as JSON, once it is up.")
    ] = None,
    timeout: Annotated[
        float, shared.seconds_option("Seconds to wait until a server is up.")
    ] = 120.0,
) -> int:
    """Serve a fleet over HTTP: OpenAI's, vLLM's and SGLang's requests."""
    addresses = shared.fleet_addresses(servers)
    try:
        from rollwire_client._gateway.gateway import GatewaySettings
        from rollwire_client._gateway.sampler import SamplerLimits
        from rollwire_client._gateway.server import GatewayStartError, Listening, serve
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the gateway needs {error.name}: pip install 'rollwire[gateway]'"
        ) from error
    settings = GatewaySettings(
        model_names=tuple(model_name or ()),
        tokenizer=tokenizer,
        renderer=renderer,
        logprob_basis=logprob_basis,
        checkpoints=tuple(checkpoints or ()),
        limits=SamplerLimits(max_sequences, max_sequence_seconds, stream_interval),
        body_bytes=max_body_bytes,
        heartbeat=heartbeat_seconds,
    )
    listening = Listening(
        address=listen,
        metrics=metrics_listen,
        certificate=listen_cert,
        key=listen_key,
        rollout_token=rollout_token_file,
        control_token=control_token_file,
        keep_alive=keep_alive_seconds,
        drain=drain_seconds,
        ready_file=ready_file,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    fleet_timeouts, credentials = Timeouts(start=timeout), context.obj

    async def run() -> None:
        await serve(
            Fleet(addresses, timeouts=fleet_timeouts, credentials=credentials), settings, listening
        )

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run())
    except GatewayStartError as error:
        shared.print_error(error)
        return 1
    return 0


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
