"""The subcommands and their flags; each one's work is in a file of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rollwire.types import KvPolicy

from rollwire_client._arguments import LONGEST
from rollwire_client._cli.generate import generate_tokens
from rollwire_client._cli.info import show_info
from rollwire_client._cli.publish import publish_checkpoint
from rollwire_client._cli.top import show_top
from rollwire_client._cli.trace import write_trace
from rollwire_client._data import Sampling
from rollwire_client._errors import RollwireError
from rollwire_client._fleet.addresses import Addresses, address_source
from rollwire_client._rpc.channels import Credentials, CredentialsError
from rollwire_client._rpc.host_address import server_address

if TYPE_CHECKING:
    from collections.abc import Coroutine

INTERRUPTED = 130  # as shells have it: 128 + SIGINT

# Typer brought click in at some version: the class has two homes, but one place among the bases.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
)


def run(arguments: list[str]) -> int:
    """Runs a subcommand; whatever the user or a server did wrong is one line on stderr."""
    logging.getLogger("rollwire_client").addHandler(logging.NullHandler())  # that line tells it
    try:
        return app(arguments, prog_name="rollwire", standalone_mode=False) or 0
    except UsageError as error:
        if message := error.format_message():  # none where the help was shown instead
            _complain(message)
        return 2
    except (RollwireError, CredentialsError) as error:
        _complain(str(error))
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _address(value: str) -> str:
    try:
        return server_address(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _addresses(values: list[str]) -> Addresses:
    """Of a fleet: some servers, or one name for all."""
    servers: Addresses = values[0] if values[0].startswith("dns:") and not values[1:] else values
    try:
        address_source(servers)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    return servers


def _token_ids(value: str) -> list[int]:
    parts = value.replace(",", " ").split()
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{value!r} is not token ids, such as 1,2,3")
    return [int(part) for part in parts]


def _file(name: str, what: str) -> Any:
    return typer.Option(
        name, exists=True, dir_okay=False, metavar="FILE", help=what,
        envvar=f"ROLLWIRE_{name.strip('-').replace('-', '_').upper()}",
    )  # fmt: skip


@app.callback()
def main(
    context: typer.Context,
    token: Annotated[Path | None, _file("--token-file", "Bearer token for the servers.")] = None,
    ca: Annotated[Path | None, _file("--tls-ca", "Who signs servers (PEM): TLS.")] = None,
    certificate: Annotated[
        Path | None, _file("--tls-cert", "This side's certificate (PEM): mutual TLS.")
    ] = None,
    key: Annotated[Path | None, _file("--tls-key", "Its private key (PEM).")] = None,
    server_name: Annotated[
        str | None,
        typer.Option(
            "--tls-server-name",
            metavar="NAME",
            envvar="ROLLWIRE_TLS_SERVER_NAME",
            help="What servers' certificates say, if not the address's host: TLS.",
        ),
    ] = None,
    *,
    use_proxy: Annotated[
        bool,
        typer.Option(
            "--use-proxy",
            envvar="ROLLWIRE_USE_PROXY",
            help="Connect through the environment's http_proxy.",
        ),
    ] = False,
) -> None:
    """Rollouts for reinforcement learning of language models."""
    try:
        context.obj = Credentials(
            token_file=token,
            ca=ca,
            certificate=certificate,
            key=key,
            server_name=server_name,
            use_proxy=use_proxy,
        )
    except ValueError as error:
        raise typer.BadParameter(f"--tls-cert, --tls-key: {error}") from error


Json = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]


@app.command()
def generate(
    context: typer.Context,
    server: Annotated[str, typer.Option(parser=_address, metavar="HOST:PORT", help="Who samples.")],
    prompt_ids: Annotated[
        str, typer.Option(parser=_token_ids, metavar="1,2,3", help="Token ids of the prompt.")
    ],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Sample so many at most; fewer if the context is full.")
    ] = 32,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of the probability, keep this much.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the likeliest k; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, of the likeliest's.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Sample the same every time.")] = None,
    *,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after it.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=LONGEST, help="Seconds to wait until the server is up.")
    ] = 60.0,
    as_json: Json = False,
) -> int:
    """Sample one sequence and show its tokens as they come, coloured by weight version."""
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    prompt: Any = prompt_ids  # parsed
    return _run(
        generate_tokens(server, prompt, sampling, context.obj, timeout=timeout, as_json=as_json)
    )


@app.command()
def info(
    context: typer.Context,
    servers: Annotated[list[str], typer.Argument(parser=_address, metavar="HOST:PORT...")],
    *,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=LONGEST, help="Seconds to wait for an answer.")
    ] = 5.0,
    as_json: Json = False,
) -> int:
    """Show what servers are, hold and are doing."""
    return _run(show_info(servers, context.obj, timeout=timeout, as_json=as_json))


@app.command()
def top(
    context: typer.Context,
    servers: Annotated[
        list[str], typer.Argument(metavar="HOST:PORT...", help="Or one dns:///NAME:PORT.")
    ],
    *,
    interval: Annotated[
        float, typer.Option(min=0.1, max=LONGEST, help="Seconds between two looks.")
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=LONGEST, help="Seconds to wait for an answer.")
    ] = 5.0,
    as_json: Json = False,
) -> int:
    """Watch a fleet, live; off a terminal, and as JSON, look once."""
    return _run(
        show_top(
            _addresses(servers), context.obj, interval=interval, timeout=timeout, as_json=as_json
        )
    )


@app.command()
def trace(
    context: typer.Context,
    servers: Annotated[
        list[str], typer.Argument(metavar="HOST:PORT...", help="Or one dns:///NAME:PORT.")
    ],
    output: Annotated[Path, typer.Option(dir_okay=False, help="The file.")] = Path("trace.json"),
    seconds: Annotated[float, typer.Option(min=0.1, max=LONGEST, help="Watch so long.")] = 10.0,
    interval: Annotated[
        float, typer.Option(min=0.01, max=LONGEST, help="Seconds between two looks.")
    ] = 0.05,
    sequences: Annotated[int, typer.Option(min=0, help="Sample so many at a time, to show.")] = 4,
    prompt_ids: Annotated[
        str, typer.Option(parser=_token_ids, metavar="1,2,3", help="Token ids of their prompt.")
    ] = "1,2,3",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each.")] = 256,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=LONGEST, help="Seconds to wait for an answer.")
    ] = 5.0,
) -> int:
    """Watch a fleet and write a timeline for Perfetto: states, updates, sequences by version."""
    prompt: Any = prompt_ids  # parsed
    return _run(
        write_trace(
            output, _addresses(servers), context.obj, prompt,
            Sampling(max_new_tokens=max_new_tokens),
            sequences=sequences, seconds=seconds, interval=interval, timeout=timeout,
        )
    )  # fmt: skip


@app.command()
def publish(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            exists=True, file_okay=False, metavar="CHECKPOINT", help="Folder of .safetensors files."
        ),
    ],
    servers: Annotated[
        list[str],
        typer.Option("--server", metavar="HOST:PORT", help="Each server; or one dns:///NAME:PORT."),
    ],
    version: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="The trainer's step. Default: an untagged update."),
    ] = None,
    kv_policy: Annotated[
        KvPolicy, typer.Option(help="What becomes of sequences' keys and values.")
    ] = KvPolicy.RECOMPUTE,
    backend: Annotated[
        str | None, typer.Option(help="Of the transport. Default: the first that all can use.")
    ] = None,
    *,
    allow_version_rollback: Annotated[
        bool, typer.Option("--allow-version-rollback", help="Even below what the servers hold.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=LONGEST, help="Seconds to wait until a server is up.")
    ] = 10.0,
    as_json: Json = False,
) -> int:
    """Make a checkpoint the policy of a fleet; 1 if a server does not serve it then."""
    return _run(
        publish_checkpoint(
            checkpoint, _addresses(servers), version, context.obj,
            kv_policy=kv_policy, backend=backend, rollback=allow_version_rollback,
            timeout=timeout, as_json=as_json,
        )
    )  # fmt: skip


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def demo(context: typer.Context) -> int:
    """Two servers, a trainer and a policy that learns, on this machine (see demo --help)."""
    from rollwire_demo import main

    code: int = main(context.args)
    return code


def _run(command: Coroutine[Any, Any, int]) -> int:
    return asyncio.run(command)


def _complain(message: str) -> None:
    print(f"rollwire: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
