"""A model's end-of-sequence tokens, the same for every engine."""

from __future__ import annotations

from typing import Any


def end_token_ids(config: Any, generation_config: Any, vocab_size: int) -> tuple[int, ...]:
    """All end-of-sequence tokens that a checkpoint names, ascending.

    ``config`` and ``generation_config`` are transformers' configurations of the model.
    """
    # They are in config.json, for the model or for its text part, and in generation_config.json, as
    # a number or a list. The files often disagree: a chat model's turn may end with a token that
    # only one of them names. So this is the union, without what is beyond the vocabulary.
    named: set[int] = set()
    for part in (config, config.get_text_config(), generation_config):
        ids = getattr(part, "eos_token_id", None)
        named.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(token for token in named if 0 <= token < vocab_size))
