"""How SGLang is started."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rollwire_server.engines.base import EngineError

# What the adapter is built on, so nobody else's to set.
OWN = {
    "model_path",
    "dtype",
    "device",
    "context_length",
    "max_running_requests",
    "skip_tokenizer_init",
    "custom_weight_loader",
    "stream_interval",
    "disable_overlap_schedule",
    "dp_size",
}

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
        device: "cpu" or "cuda".
        max_running_sequences: Sequences that are sampled side by side.
        context_length: Prompt and output tokens of one sequence; None: the model's.
        unresponsive_seconds: The scheduler counts as dead when it says nothing for so long.
        arguments: Of SGLang's own ``ServerArgs``, by name.
    """

    model: str
    dtype: str
    device: str
    max_running_sequences: int
    context_length: int | None = None
    unresponsive_seconds: float = 20.0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if refused := sorted(OWN & self.arguments.keys()):
            raise EngineError(f"--engine-arg: {', '.join(refused)}: the server sets this itself")
        if not isinstance(self.unresponsive_seconds, int | float) or self.unresponsive_seconds <= 0:
            raise EngineError("--engine-arg: unresponsive-seconds must be a number above 0")

    @property
    def on_cpu(self) -> bool:
        """Whether the weights are in host memory."""
        return self.device == "cpu"

    def server_args(self, loader: str) -> dict[str, Any]:
        """What SGLang is started with; ``loader`` names the function that puts weights in place."""
        return {
            "grammar_backend": "none",
            "log_level": "error",
            **(ON_CPU if self.on_cpu else {}),
            **self.arguments,
            "model_path": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "context_length": self.context_length,
            "max_running_requests": self.max_running_sequences,
            "skip_tokenizer_init": True,
            "custom_weight_loader": [loader],
            "stream_interval": 1,
            # With overlap a step is in flight when a pause returns, and its tokens would be told
            # after a commit that they were sampled before.
            "disable_overlap_schedule": True,
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
