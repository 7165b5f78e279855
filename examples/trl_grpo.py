"""TRL's GRPOTrainer on rollwire's servers: a model learns to write digits.

    pip install '.[server,trl]'
    rollwire-server --model builtin:tiny --listen 127.0.0.1:50051 --log-level warning &
    rollwire-server --model builtin:tiny --listen 127.0.0.1:50052 --log-level warning &
    python examples/trl_grpo.py

Forty steps take its reward from below 0.1 to above 0.8. The model and its tokenizer are built here,
so that nothing is downloaded; with a checkpoint of yours, load both from its directory.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from rollwire_client.integrations.trl import RollwireGeneration
from rollwire_client.sync import SyncFleet
from rollwire_server import builtin_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LENGTH = 16  # tokens of a completion
TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}: {{ message.content }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<start>assistant: {% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and three more."""
    special = ["<pad>", "<start>", "<end>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def digits(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """The share of digits in what was written."""
    return [sum(c in "0123456789" for c in reply["content"]) / LENGTH for (reply,) in completions]


def train(servers: list[str], folder: Path, steps: int) -> None:
    """Trains for some steps; one policy is published for each."""
    trainer = GRPOTrainer(
        model=builtin_model("builtin:tiny"),  # or the directory of the servers' checkpoint
        processing_class=byte_tokenizer(),
        reward_funcs=digits,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": f"write {i}"}] for i in range(64)]}
        ),
        args=GRPOConfig(
            str(folder),
            max_steps=steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=LENGTH,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
    )
    with RollwireGeneration(trainer, SyncFleet(servers)) as generation:
        trainer.train()
        if trainer.accelerator.is_main_process:
            logs = [entry for entry in trainer.state.log_history if "reward" in entry]
            worst = max(log["sampling/sampling_logp_difference/max"] for log in logs)
            print(f"reward {logs[0]['reward']:.3f} → {logs[-1]['reward']:.3f}")
            print(f"version {generation.version}, worst log-probability difference {worst:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", nargs="+", default=["127.0.0.1:50051", "127.0.0.1:50052"])
    parser.add_argument("--folder", type=Path, default=Path("run"), help="TRL's output folder")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    train(options.servers, options.folder, options.steps)
