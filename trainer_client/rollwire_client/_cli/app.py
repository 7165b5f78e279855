"""The ``rollwire`` command: its subcommands, the flags of all, and exit codes."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import typer

from rollwire_client._cli.control import pause, resume, sleep, wake
from rollwire_client._cli.gateway import gateway
from rollwire_client._cli.generate import generate
from rollwire_client._cli.publish import publish
from rollwire_client._cli.servers import info, top
from rollwire_client._cli.shared import print_error
from rollwire_client._cli.trace import trace
from rollwire_client._cli.view import view
from rollwire_client._errors import RollwireError
from rollwire_client._rpc.channel import Credentials, CredentialsError

INTERRUPTED = 130  # as shells have it: 128 + SIGINT

# Typer brought click in at some version: the class has two homes, but one place among the bases.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(add_completion=False, no_args_is_help=True)
for subcommand in (
    generate, info, top, trace, view, publish, sleep, wake, pause, resume, gateway,
):  # fmt: skip
    app.command()(subcommand)


def run(arguments: list[str]) -> int:
    """Runs a subcommand; whatever the user or a server did wrong is one line on stderr."""
    logging.getLogger("rollwire_client").addHandler(logging.NullHandler())  # that line says it
    try:
        return app(arguments, prog_name="rollwire", standalone_mode=False) or 0
    except UsageError as error:
        if message := error.format_message():  # none where the help was shown instead
            print_error(message)
        return 2
    except (RollwireError, CredentialsError) as error:
        print_error(error)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _file(name: str, what: str) -> Any:
    return typer.Option(
        name, exists=True, dir_okay=False, metavar="FILE", help=what,
        envvar=f"ROLLWIRE_{name.strip('-').replace('-', '_').upper()}",
    )  # fmt: skip


@app.callback()
def main(
    context: typer.Context,
    token: Annotated[Path | None, _file("--token-file", "Bearer token for the servers.")] = None,
    ca: Annotated[
        Path | None, _file("--tls-ca", "Certificate authority of the servers (PEM); turns TLS on.")
    ] = None,
    certificate: Annotated[
        Path | None, _file("--tls-cert", "Client certificate (PEM), for mutual TLS.")
    ] = None,
    key: Annotated[
        Path | None, _file("--tls-key", "Private key of the client certificate (PEM).")
    ] = None,
    server_name: Annotated[
        str | None,
        typer.Option(
            "--tls-server-name",
            metavar="NAME",
            envvar="ROLLWIRE_TLS_SERVER_NAME",
            help="Host name in the servers' certificates, if not the address's; turns TLS on.",
        ),
    ] = None,
    *,
    use_proxy: Annotated[
        bool,
        typer.Option(
            "--use-proxy",
            envvar="ROLLWIRE_USE_PROXY",
            help="Connect through the proxy that the environment names (http_proxy, https_proxy).",
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


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def demo(context: typer.Context) -> int:
    """Run two servers and a trainer whose policy learns, on this machine (see demo --help)."""
    from rollwire_demo import main

    code: int = main(context.args)
    return code
