"""How SGLang is started."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from rollwire_server.engines.base import EngineError

# The server sets these itself.
OWN = {
    "model_path",
    "dtype",
    "device",
    "base_gpu_id",
    "context_length",
    "max_running_requests",
    "skip_tokenizer_init",
    "custom_weight_loader",
    "stream_interval",
    "dp_size",
    "watchdog_timeout",
}

# SGLang's own watchdog would take a pause for a hang, and end SGLang.
NEVER_SECONDS = 1e9

# On a CPU SGLang would choose backends that are not there.
ON_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 65536,
}


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """How to start ``SglangEngine``.

    Attributes:
        model: A checkpoint directory. dtype: Of the weights, as torch names it; "auto": the
        checkpoint's. device: "cpu", "cuda", or the first of several devices: "cuda:1".
        max_running_sequences: How many sequences are sampled at once. context_length: The
        most tokens of prompt and output together; None: the model's. staging: Where an update
        waits for its commit: "device", "host", or "auto" (on the devices if
            they have room).
        unresponsive_seconds: The scheduler counts as dead after this long without an answer.
        arguments: Further arguments of SGLang's ``ServerArgs``.
    """

    model: str
    dtype: str
    device: str
    max_running_sequences: int
    context_length: int | None = None
    staging: str = "auto"
    unresponsive_seconds: float = 20.0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if refused := sorted(OWN & self.arguments.keys()):
            raise EngineError(f"--engine-arg: {', '.join(refused)}: the server sets this itself")
        if self.arguments.get("pp_size", 1) != 1:
            raise EngineError("--engine-arg: pp-size is not supported: use tp-size")
        if not isinstance(self.unresponsive_seconds, int | float) or self.unresponsive_seconds <= 0:
            raise EngineError("--engine-arg: unresponsive-seconds must be a number above 0")

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def devices(self) -> list[torch.device]:
        """The device of each scheduler process; one on a CPU."""
        if self.on_cpu:
            return [torch.device("cpu")]
        first, step = torch.device(self.device).index or 0, self.arguments.get("gpu_id_step", 1)
        ranks = self.arguments.get("tp_size", 1)
        return [torch.device("cuda", first + i * step) for i in range(ranks)]

    def server_args(self, loader: str) -> dict[str, Any]:
        """SGLang's arguments; ``loader`` is the name of the function that puts weights in place."""
        return {
            "grammar_backend": "none",
            "log_level": "error",
            **(ON_CPU if self.on_cpu else {}),
            **self.arguments,
            "model_path": self.model,
            "dtype": self.dtype,
            "device": self.devices[0].type,
            "base_gpu_id": self.devices[0].index or 0,
            "context_length": self.context_length,
            "max_running_requests": self.max_running_sequences,
            "skip_tokenizer_init": True,
            "custom_weight_loader": [loader],
            "stream_interval": 1,
            "watchdog_timeout": NEVER_SECONDS,
        }


def parse_arguments(texts: dict[str, str]) -> dict[str, Any]:
    """Values of ``--engine-arg``: JSON if they parse (numbers, true, lists), else text."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values
