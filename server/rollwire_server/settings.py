"""The flags of ``rollwire-server``; each is a ROLLWIRE_ environment variable too."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import sys
from pathlib import Path  # noqa: TC003  pydantic reads the annotation
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from pydantic import AfterValidator, Field, PositiveInt, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_core import ErrorDetails


class StartError(Exception):
    """The server cannot start as its settings say; the message is for whoever starts it."""


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    number = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or "/" in host or not number or int(port) > 65535:
        raise ValueError("must be HOST:PORT, for example 127.0.0.1:50051; port 0 picks a free one")
    return value


def parse_listen_range(value: str) -> tuple[str | None, tuple[int, int] | None]:
    """The host and the ports of "HOST:FIRST-LAST"; None for each that leaves the choice open."""
    match = re.fullmatch(r"(?P<host>.+):(?:0|(?P<first>[0-9]{1,5})-(?P<last>[0-9]{1,5}))", value)
    if match is None:
        raise ValueError(
            "must be HOST:FIRST-LAST, for example 0.0.0.0:52000-52999, or HOST:0 for any port"
        )
    host = match["host"].removeprefix("[").removesuffix("]")
    try:
        open_choice = ipaddress.ip_address(host).is_unspecified
    except ValueError as error:
        raise ValueError(
            f"{host} is not an IP address: use one of this machine, or 0.0.0.0 for any"
        ) from error
    if match["first"] is None:
        return None if open_choice else host, None
    first, last = int(match["first"]), int(match["last"])
    if not 0 < first <= last <= 65535:
        raise ValueError(f"{first}-{last} is not a range of ports")
    if last - first + 1 < MIN_PORTS:
        raise ValueError(
            f"{first}-{last} has fewer than {MIN_PORTS} ports: every transfer needs new ones"
        )
    return None if open_choice else host, (first, last)


def _listen_range(value: str) -> str:
    parse_listen_range(value)
    return value


MIN_PORTS = 16
ENV_PREFIX = "ROLLWIRE_"  # what their environment variables begin with

Address = Annotated[str, AfterValidator(_address)]
ListeningAddress = Annotated[str, AfterValidator(_listen_range)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ServerSettings(BaseSettings):
    """Serves rollouts of one model over gRPC."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="ignore")

    model: str = Field(
        description="a Hugging Face checkpoint directory, builtin:tiny or builtin:tiny-moe"
    )
    engine: Literal["embedded", "sglang", "synthetic"] = Field(
        "embedded",
        description="embedded: plain PyTorch, in this process; sglang: SGLang; synthetic: random "
        "tokens at a set rate, without a model",
    )
    engine_arg: list[str] = Field(
        [],
        description="name=value for the engine; may be repeated; sglang: any argument of SGLang "
        "(tp-size=2), or unresponsive-seconds (20); synthetic: tokens-per-second of each sequence "
        "(100; 0: as fast as possible), vocab-size (512), weight-bytes (4096)",
    )
    listen: Address = Field("127.0.0.1:50051", description="HOST:PORT of the API; port 0 picks one")
    ready_file: Path | None = Field(
        None, description="file to write the server's addresses to, as JSON, once it is up"
    )
    health_listen: Address | None = Field(
        None,
        description="HOST:PORT for the health service alone, without TLS, for probes; the API's "
        "address has the health service too",
    )
    transport_listen: ListeningAddress | None = Field(
        None,
        description="HOST:FIRST-LAST, the address and ports on which weight transfers listen; HOST "
        "is an IP address of this machine, or 0.0.0.0 for the address that faces the trainer; "
        "HOST:0 allows any port; a backend that cannot be limited to this is not offered; by "
        "default 0.0.0.0:0",
    )
    tls_cert: Path | None = Field(
        None,
        description="certificate chain (PEM); TLS and token files are read again when they change",
    )
    tls_key: Path | None = Field(None, description="private key of the certificate (PEM)")
    tls_client_ca: Path | None = Field(
        None,
        description="for mutual TLS: the authority (PEM) that must have signed callers' "
        "certificates",
    )
    rollout_token_file: Path | None = Field(
        None,
        description="bearer token for Generate, StreamRollouts, Abort by id, GetServerInfo, "
        "reflection",
    )
    control_token_file: Path | None = Field(
        None, description="bearer token for every call; outside loopback tokens need TLS"
    )
    metrics_listen: Address | None = Field(
        None, description="HOST:PORT for Prometheus metrics; none by default"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, …; auto: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of the weights; auto: the checkpoint's"
    )
    context_length: PositiveInt | None = Field(
        None,
        description="most tokens of prompt and output together; by default the model's limit, or "
        "less if memory is short",
    )
    max_running: PositiveInt = Field(64, description="most sequences sampled at the same time")
    max_waiting: int = Field(1024, ge=0, description="most sequences that wait to be sampled")
    max_streams_per_client: PositiveInt = Field(
        256,
        description="most StreamRollouts calls of one client address; each call can have any "
        "number of sequences",
    )
    prefill_tokens: PositiveInt = Field(
        2048,
        description="most prompt tokens computed in one step, so that prefills do not slow down "
        "running sequences",
    )
    staging: Literal["auto", "device", "host"] = Field(
        "auto",
        description="where an update waits for its commit; auto: on the GPU if there is room, else "
        "in host memory; on a CPU always in host memory",
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of the embedded engine")
    max_sequence_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        3600.0, description="longest time from a sequence's arrival to its last token"
    )
    await_weights: bool = Field(
        default=False, description="serve nothing before the first committed update"
    )
    frozen: bool = Field(
        default=False, description="refuse weight updates (for a judge or reward model)"
    )
    drain_seconds: Seconds = Field(
        30.0, description="after SIGTERM, how long running sequences may continue"
    )
    pause_lease_seconds: Seconds = Field(
        300.0, description="lease of a pause that sets none of its own; 0: no end"
    )
    bucket_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        30.0, description="how long a weight transfer may be silent before it fails"
    )
    reflection: bool = Field(default=True, description="gRPC reflection, for grpcurl")
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="auto: text on a terminal, else JSON lines"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def read_settings(arguments: list[str]) -> ServerSettings:
    """The settings from flags and environment; exits with one line when they are wrong."""
    source: CliSettingsSource[ServerSettings] = CliSettingsSource(
        ServerSettings,
        root_parser=_ArgumentParser(
            prog="rollwire-server",
            description=ServerSettings.__doc__,
            formatter_class=_HelpFormatter,
        ),
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


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves out defaults that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return re.sub(r" \(default: (null|\[\])\)$", "", action.help or "")


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


def unknown_variables() -> list[str]:
    """Environment variables that look like settings, perhaps misspelt."""
    known = {ENV_PREFIX + field.upper() for field in ServerSettings.model_fields}
    return sorted(
        name
        for name in os.environ
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    )
