"""Groups of samples by the batch: over-sampling, tails, staleness, evaluation, saved buffers."""

from rollwire_client.batches.batcher import Batcher
from rollwire_client.batches.data import (
    Batch,
    Carry,
    Decision,
    Drop,
    DropReason,
    Evaluation,
    Group,
    Part,
    Progress,
    Prompt,
    Sample,
    Tail,
)

__all__ = [
    "Batch",
    "Batcher",
    "Carry",
    "Decision",
    "Drop",
    "DropReason",
    "Evaluation",
    "Group",
    "Part",
    "Progress",
    "Prompt",
    "Sample",
    "Tail",
]
