"""The embedded engine: continuous batching over a Hugging Face language model, in process."""

from rollwire_server.engines.embedded.engine import EmbeddedEngine
from rollwire_server.engines.embedded.startup import EmbeddedConfig
from rollwire_server.engines.embedded.weights import StagingPlace

__all__ = ["EmbeddedConfig", "EmbeddedEngine", "StagingPlace"]
