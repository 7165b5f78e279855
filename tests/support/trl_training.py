"""A trainer of TRL's for tests: the built-in model learns to write digits. Under torchrun it is run
as a script.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rollwire_client import PublishError
from rollwire_client.integrations.trl import RollwireGeneration
from rollwire_client.sync import SyncFleet
from rollwire_server import builtin_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import add_response_schema, qwen3_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DIFFERENCE = "sampling/sampling_logp_difference/max"
LENGTH = 12
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS, _ENDS = 128, 125  # of the 512 tokens of the built-in model


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte; some are a whole tool call, and some end a reply, so that a model with
    random weights calls tools and ends.
    """
    ends = [f"<end {number}>" for number in range(_ENDS)]
    calls = [
        f'<tool_call>\n{{"name": "double", "arguments": {{"number": {number}}}}}\n</tool_call>'
        for number in range(_CALLS)
    ]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*_SPECIAL, *ends, *alphabet]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=_SPECIAL[0], eos_token=_SPECIAL[2]
    )
    fast.add_special_tokens({"additional_special_tokens": [_SPECIAL[1], *ends]})
    fast.add_tokens(calls)
    assert len(fast) == 512
    fast.chat_template = qwen3_chat_template
    return add_response_schema(fast)


def model() -> PreTrainedModel:
    made = builtin_model("builtin:tiny")
    made.generation_config.eos_token_id = list(range(2, 3 + _ENDS))
    return made


def data(prompts: int = 32) -> Dataset:
    """Each prompt is there twice."""
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"write {i // 2}"}] for i in range(prompts)]}
    )


def digits(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The share of digits."""
    return [
        sum(c.isdigit() for reply in replies for c in reply.get("content", "")) / LENGTH
        for replies in completions
    ]


def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: Any number.
    """
    return str(2 * number)


def make(folder: Path, *, lora: bool = False, **others: Any) -> GRPOTrainer:
    """A trainer; other arguments are its own or its config's."""
    own = {name: others.pop(name) for name in ("model", "tools", "callbacks") if name in others}
    settings: dict[str, Any] = {
        "max_steps": 8,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "disable_tqdm": True,
        **others,
    }
    return GRPOTrainer(
        model=own.pop("model", None) or model(),
        processing_class=tokenizer(),
        reward_funcs=digits,
        train_dataset=data(),
        eval_dataset=data(4),
        args=GRPOConfig(str(folder), **settings),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
        **own,
    )


def worst_difference(trainer: GRPOTrainer) -> float:
    """Between the servers' log-probabilities and the trainer's, over all steps."""
    return max(entry[DIFFERENCE] for entry in trainer.state.log_history if DIFFERENCE in entry)


def main() -> None:
    """One process of several; the first says what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    with_tools = {"tools": [double], "max_completion_length": 600, "max_steps": 2}
    for settings in ({}, {"lora": True}, with_tools):
        trainer = make(options.folder, per_device_train_batch_size=8, **settings)
        with RollwireGeneration(trainer, SyncFleet(options.servers)) as generation:
            trainer.train()
        outcomes.append(
            {
                "processes": trainer.accelerator.num_processes,
                "difference": worst_difference(trainer),
                "version": generation.version,
            }
        )
    # The first process raises what it fails with, and so do the others.
    with RollwireGeneration(trainer, SyncFleet(options.servers), require="all") as generation:
        try:
            trainer.train()
        except PublishError as error:
            outcomes.append({"error": str(error)})
    said = options.folder / f"rank-{trainer.accelerator.process_index}.json"
    said.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
