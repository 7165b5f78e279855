"""Groups of samples by the batch: over-sampling, tails, staleness, evaluation, saved buffers."""

from rollwire_client._batches.batch import (
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
from rollwire_client._batches.batcher import Batcher

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
