"""The ``rollwire-server`` command."""

from __future__ import annotations

import asyncio
import atexit
import os
import resource
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rollwire_server.settings import ServerSettings

MAX_OPEN_FILES = 1 << 16  # connections are files


def main() -> None:
    """Reads the flags, serves, and exits: 0 after a drain, 1 on failure, 2 on a wrong flag."""
    try:
        import structlog

        from rollwire_server.logs import configure
        from rollwire_server.settings import read_settings, unknown_variables
    except ModuleNotFoundError as error:
        sys.exit(f"rollwire-server: needs {error.name}: pip install 'rollwire[server]'")
    settings = read_settings(sys.argv[1:])
    configure(settings.log_format, settings.log_level)
    if unknown := unknown_variables():
        structlog.get_logger().warning("environment variables that are no settings", names=unknown)
    raise_open_file_limit()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core prints what it also raises
    _serve(settings)


def _serve(settings: ServerSettings) -> NoReturn:
    # Import torch and gRPC only once the flags are known to be right.
    from rollwire_server.server import EngineDied, RolloutServer
    from rollwire_server.settings import StartError

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
    """Allows as many open files as the system does: the usual soft limit, 1,024, would also be a
    limit on connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
