"""The embedded engine: continuous batching over a Hugging Face language model, in process.

``engine`` runs commands and steps on a thread of its own. A step goes from ``scheduler`` (which
tokens of which slots: ``StepPlan``) to ``batch`` (tensors), ``model`` with ``attention`` over the
``kv_cache`` (logits), ``sampling`` (tokens) and ``output`` (the ``Step`` that the server gets);
``runner`` calls them in this order. ``startup`` loads a ``checkpoint``, has ``probe`` test it, and
sizes the cache. ``weights`` stages and replaces what serves.
"""

from rollwire_server.engines.embedded.engine import EmbeddedEngine
from rollwire_server.engines.embedded.startup import EmbeddedConfig
from rollwire_server.engines.embedded.weights import StagingPlace

__all__ = ["EmbeddedConfig", "EmbeddedEngine", "StagingPlace"]
