"""What the embedded engine is started with."""

from __future__ import annotations

from dataclasses import dataclass

from rollwire_server.engines.embedded.staging import StagingPlace


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """How to start an ``EmbeddedEngine``.

    Attributes:
        model: The directory of a Hugging Face checkpoint, ``builtin:tiny`` or ``builtin:tiny-moe``.
        dtype: Of the weights, as torch names it; "auto" is the checkpoint's own.
        device: As torch names it; "auto" is a CUDA device if there is one, else the CPU.
        max_running_sequences: Sequences sampled side by side; the rest wait.
        context_length: Prompt and output tokens of one sequence. None: what the model can, bounded
            by the memory that the KV cache may take (and by 4096 on a CPU).
        prefill_tokens: Prompt tokens that one step computes at most beside decoding.
        staging: Where an update waits for its commit.
        threads: torch's threads on a CPU. Small models on a busy machine are many times slower with
            two than with one.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_running_sequences: int = 64
    context_length: int | None = None
    prefill_tokens: int = 2048
    staging: StagingPlace = StagingPlace.AUTO
    threads: int = 1
