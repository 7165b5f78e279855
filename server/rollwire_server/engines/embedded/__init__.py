"""The embedded engine: continuous batching over a Hugging Face language model, in process.

``engine`` runs commands and steps on a thread of its own. A step goes from ``scheduler`` (which
tokens of which slots: ``StepPlan``) to ``batch`` (tensors), ``model`` (logits), ``sampling``
(tokens) and ``output`` (the ``Step`` that the server gets); ``runner`` calls them in this order.
"""

from rollwire_server.engines.embedded.engine import EmbeddedEngine
from rollwire_server.engines.embedded.startup import EmbeddedConfig

__all__ = ["EmbeddedConfig", "EmbeddedEngine"]
