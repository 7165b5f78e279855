"""How SGLang is started."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from rollwire_server.engines.base import EngineError

# What the adapter is built on, so nobody else's to set.
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

# SGLang's own watchdog takes a pause for a hang, and would end it.
NEVER_SECONDS = 1e9

# On a CPU, where SGLang itself chooses what is not there.
ON_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 65536,
}


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """What ``SglangEngine`` needs to know.

    Attributes:
        model: A checkpoint directory.
        dtype: Of the weights, as torch names it; "auto": the checkpoint's.
        device: "cpu", "cuda", or "cuda:1", …: the first of the devices that it takes.
        max_running_sequences: Sequences that are sampled side by side.
        context_length: Prompt and output tokens of one sequence; None: the model's.
        staging: Where an update waits for its commit: "device", "host", or "auto": on the devices
            where they have room.
        unresponsive_seconds: The scheduler counts as dead when it says nothing for so long.
        arguments: Of SGLang's own ``ServerArgs``, by name.
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
            raise EngineError("--engine-arg: pp-size: a server spreads by tp-size only")
        if not isinstance(self.unresponsive_seconds, int | float) or self.unresponsive_seconds <= 0:
            raise EngineError("--engine-arg: unresponsive-seconds must be a number above 0")

    @property
    def on_cpu(self) -> bool:
        """Whether the weights are in host memory."""
        return self.device == "cpu"

    @property
    def devices(self) -> list[torch.device]:
        """Those of its processes, one each; one for all on a CPU."""
        if self.on_cpu:
            return [torch.device("cpu")]
        first, step = torch.device(self.device).index or 0, self.arguments.get("gpu_id_step", 1)
        ranks = self.arguments.get("tp_size", 1)
        return [torch.device("cuda", first + i * step) for i in range(ranks)]

    def server_args(self, loader: str) -> dict[str, Any]:
        """What SGLang is started with; ``loader`` names the function that puts weights in place."""
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
    """Values of ``--engine-arg``: JSON where they are it (numbers, true, lists), else text."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values
