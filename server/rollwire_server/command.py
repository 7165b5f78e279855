"""The ``rollwire-server`` command: reads the flags, serves, exits."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import os
import resource
import sys
from typing import TYPE_CHECKING, NoReturn

import structlog
from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, SettingsError

from rollwire_server.logs import configure
from rollwire_server.settings import ENV_PREFIX, ServerSettings, StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_core import ErrorDetails

log = structlog.get_logger()

MAX_OPEN_FILES = 1 << 16  # connections are files


def run() -> None:
    """Reads the flags, serves, and exits: 0 after a drain, 1 on failure, 2 on a wrong flag."""
    settings = read_settings(sys.argv[1:])
    configure(settings.log_format, settings.log_level)
    if unknown := _unknown_variables():
        log.warning("environment variables that are no settings", names=unknown)
    raise_open_file_limit()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core prints what it also raises
    # Import torch and gRPC only once the flags are known to be right.
    from rollwire_server.server import EngineDied, RolloutServer

    async def serve() -> None:
        await RolloutServer(settings).run()

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve())
    except (StartError, EngineDied) as error:
        _exit(f"rollwire-server: {error}")
    _exit(None)


def _exit(why: str | None) -> NoReturn:
    """Ends the process; the last line on standard error says why.

    With SGLang the interpreter is not finalized: SGLang's bindings would then report leaks in some
    thirty lines below the one that matters.
    """
    if "sglang" not in sys.modules:
        sys.exit(why)
    if why is not None:
        print(why, file=sys.stderr)  # noqa: T201
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if why is None else 1)


def raise_open_file_limit() -> None:
    """Allows as many open files as the system does. The usual soft limit, 1,024, would also be a
    limit on connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def read_settings(arguments: list[str]) -> ServerSettings:
    """The settings from flags and environment; exits with one line when they are wrong."""
    source: CliSettingsSource[ServerSettings] = CliSettingsSource(
        ServerSettings,
        root_parser=_ArgumentParser(prog="rollwire-server", description=ServerSettings.__doc__),
        cli_parse_args=arguments,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )
    try:
        return ServerSettings(_cli_settings_source=source)  # type: ignore[call-arg]
    except ValidationError as error:
        problems = "; ".join(_problem(details, arguments) for details in error.errors())
    except SettingsError as error:
        problems = str(error)
    print(f"rollwire-server: {problems} (--help lists the flags)", file=sys.stderr)  # noqa: T201
    sys.exit(2)


class _ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def _problem(details: ErrorDetails, arguments: Sequence[str]) -> str:
    message = details["msg"].removeprefix("Value error, ")
    if not details["loc"]:
        return message
    field = str(details["loc"][0])
    flag, variable = "--" + field.replace("_", "-"), ENV_PREFIX + field.upper()
    if details["type"] == "missing":
        return f"{flag} (or {variable}) is not given"
    given = {argument.partition("=")[0] for argument in arguments}
    by_flag = flag in given or flag.replace("--", "--no-", 1) in given
    return f"{flag if by_flag else variable} is {details['input']!r}: {message}"


def _unknown_variables() -> list[str]:
    """Environment variables that look like settings and are none, perhaps misspelt."""
    known = {ENV_PREFIX + field.upper() for field in ServerSettings.model_fields}
    return sorted(
        name
        for name in os.environ
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    )


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
