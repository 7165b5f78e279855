"""The rollwire rollout server: gRPC services, sequences, weight state, engines.

Importing it needs no torch; ``builtin_model`` does.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["__version__", "builtin_model"]

__version__ = version("rollwire")


def builtin_model(name: str) -> PreTrainedModel:
    """The model that ``rollwire-server --model builtin:…`` serves, for a trainer to begin with.

    Args:
        name: "builtin:tiny" or "builtin:tiny-moe".

    Returns:
        A causal LM in fp32 on the CPU, always with the same random weights.

    Raises:
        ValueError: There is no such model.
    """
    from rollwire_server.engines.embedded.checkpoint import BUILTIN, build

    if name not in BUILTIN:
        raise ValueError(f"there is no built-in model {name!r}, only {', '.join(sorted(BUILTIN))}")
    return build(name)
