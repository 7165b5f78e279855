from __future__ import annotations

from typing import Any

import pytest
from rollwire_server.engines.base import end_token_ids
from transformers import GenerationConfig, LlavaConfig, Qwen2Config


def dense(eos: Any) -> Qwen2Config:
    return Qwen2Config(eos_token_id=eos)


def with_images(eos: Any, text: Any) -> LlavaConfig:
    config = LlavaConfig(text_config=dense(text))
    config.eos_token_id = eos
    return config


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (dense([7, 9]), 7, (7, 9)),
        (dense(7), [9, 7], (7, 9)),
        (dense(None), 9, (9,)),
        (dense(7), None, (7,)),
        (dense(0), [], (0,)),
        (dense(None), None, ()),
        (dense([7, 512]), -1, (7,)),
        (with_images(7, [8]), [9], (7, 8, 9)),
        (with_images(None, 8), None, (8,)),
    ],
)
def test_what_any_file_names_ends_a_sequence(
    config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    told = GenerationConfig(eos_token_id=generation)
    assert end_token_ids(config, told, 512) == expected
    if generation is None:
        assert end_token_ids(config, None, 512) == expected
