"""Engines that sample. ``create_engine`` makes one; the server knows it through ``base`` alone."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from rollwire_server.engines.base import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire_server.engines.base import Engine
    from rollwire_server.settings import ServerSettings


def create_engine(settings: ServerSettings) -> Engine:
    """The engine that the settings name, not started; EngineError if an ``engine_arg`` is wrong."""
    return _ENGINES[settings.engine](settings)


def _create_embedded(settings: ServerSettings) -> Engine:
    from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine

    if settings.engine_arg:
        raise EngineError("--engine-arg: the embedded engine has none, only flags of its own")
    return EmbeddedEngine(
        EmbeddedConfig(
            model=settings.model,
            dtype=settings.dtype,
            device=settings.device,
            max_running_sequences=settings.max_running,
            context_length=settings.context_length,
            prefill_tokens=settings.prefill_tokens,
            staging=settings.staging,
            threads=settings.threads,
        )
    )


def _create_synthetic(settings: ServerSettings) -> Engine:
    from pydantic import ValidationError

    from rollwire_server.engines.synthetic import SyntheticConfig, SyntheticEngine

    arguments = parse_arguments(settings.engine_arg)
    flags = {"model", "max_running_sequences", "context_length"}  # not by --engine-arg
    names = [f.name for f in dataclasses.fields(SyntheticConfig) if f.name not in flags]
    if unknown := arguments.keys() - names:
        raise EngineError(
            f"--engine-arg: the synthetic engine has no {', '.join(sorted(unknown))}, only "
            f"{', '.join(names)}"
        )
    values: dict[str, Any] = {"max_running_sequences": settings.max_running, **arguments}
    if settings.context_length is not None:
        values["context_length"] = settings.context_length
    try:
        return SyntheticEngine(SyntheticConfig(settings.model, **values))
    except ValidationError as error:
        problems = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise EngineError(f"--engine-arg: {problems}") from error


def _create_sglang(settings: ServerSettings) -> Engine:
    from rollwire_server.engines.sglang import SglangConfig, SglangEngine
    from rollwire_server.engines.sglang.launch import UNRESPONSIVE_SECONDS

    arguments = parse_arguments(settings.engine_arg)
    device = settings.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return SglangEngine(
        SglangConfig(
            model=settings.model,
            dtype=settings.dtype,
            device=device,
            max_running_sequences=settings.max_running,
            context_length=settings.context_length,
            staging=settings.staging,
            unresponsive_seconds=arguments.pop("unresponsive_seconds", UNRESPONSIVE_SECONDS),
            arguments=arguments,
        )
    )


_ENGINES: dict[str, Callable[[ServerSettings], Engine]] = {
    "embedded": _create_embedded,
    "synthetic": _create_synthetic,
    "sglang": _create_sglang,
}


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Parses "name=value"s of ``--engine-arg``; dashes in names count as underscores.

    A value is JSON if it parses (numbers, true, lists), else text.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise EngineError(f"--engine-arg: {text!r} is not name=value")
        try:
            arguments[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            arguments[name.replace("-", "_")] = value
    return arguments
