"""The tokens that end a sequence of a model, the same for every engine."""

from __future__ import annotations

from typing import Any


def end_token_ids(config: Any, generation_config: Any, vocab_size: int) -> tuple[int, ...]:
    """All end-of-sequence tokens that a checkpoint names, ascending.

    They stand in config.json, there for the whole model or for its text part, and in
    generation_config.json, as a number or a list. Files often disagree (a chat model's turn may end
    with a token that only one of them names), so this is the union. What is beyond the vocabulary
    cannot be sampled, and is left out.

    Args:
        config: transformers' configuration of the model.
        generation_config: That of its generation, if there is one.
        vocab_size: Of its logits.
    """
    named: set[int] = set()
    for part in (config, config.get_text_config(), generation_config):
        ids = getattr(part, "eos_token_id", None)
        named.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(token for token in named if 0 <= token < vocab_size))
