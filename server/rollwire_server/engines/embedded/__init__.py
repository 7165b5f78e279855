"""The embedded engine: continuous batching over a Hugging Face language model, in process."""

from .config import EmbeddedConfig
from .engine import EmbeddedEngine
from .staging import StagingPlace

__all__ = ["EmbeddedConfig", "EmbeddedEngine", "StagingPlace"]
