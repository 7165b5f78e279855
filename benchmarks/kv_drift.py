"""How far the log-probabilities of sampled tokens lie from the trainer's own, by KV policy.

    python benchmarks/kv_drift.py --shape tiny                    on a CPU, within a minute
    python benchmarks/kv_drift.py --model FOLDER --dtype bfloat16 --trainer cuda --server cuda
    python benchmarks/kv_drift.py --model FOLDER --checkpoints FOLDER …    of a real training

A trainer publishes one policy after another to a real server while streams decode. After a commit
that keeps keys and values, tokens attend to those of older policies. Each token that was sampled
after the first commit is scored again by a plain forward pass of transformers' model with the
weights that the token names. Printed for each KV policy: the mean and the largest difference of the
two log-probabilities, and the share of tokens that attended to older keys or values. What RECOMPUTE
shows is the rounding of the engine and of the forward pass.

Each policy differs from the one before it by noise, whose standard deviation is ``--noise`` times
that of the tensor; with ``--checkpoints`` they are the checkpoints in that folder, in the order of
their names' numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from common import add_kv_policies, add_shape, checkpoint, machine, parse, print_table, servers
from rollwire_client import Fleet, Publisher, Sampling, Timeouts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollwire_client import Chunk
    from transformers import PreTrainedModel

HEADER = ["", "tokens", "old keys", "mean", "largest"]


class Policies:
    """The trainer's model, and the policies that it goes through."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model.requires_grad_(requires_grad=False)
        self.model: PreTrainedModel = model.to(options.trainer).eval()
        self._noise = options.noise
        self._checkpoints = _in_order(options.checkpoints) if options.checkpoints else None
        self._first = {name: t.cpu().clone() for name, t in self.model.named_parameters()}
        self._number = 0  # that the model is now
        self.count = len(self._checkpoints) if self._checkpoints else options.publishes

    def load(self, number: int) -> None:
        """Makes the model policy ``number``, from 1 on; 0 is what it was at the start."""
        if number < self._number or self._checkpoints is not None:
            self.model.load_state_dict(self._first, strict=False)
            self._number = 0
        if self._checkpoints is not None and number:
            folder = self._checkpoints[number - 1]
            read = type(self.model).from_pretrained(folder, dtype=self.model.dtype)
            self.model.load_state_dict(read.state_dict())
        elif self._checkpoints is None:
            for step in range(self._number + 1, number + 1):
                self._add_noise(step)
        self._number = number

    def _add_noise(self, step: int) -> None:
        for place, tensor in enumerate(self.model.parameters()):
            generator = torch.Generator(tensor.device).manual_seed(step << 16 | place)
            drawn = torch.empty_like(tensor, dtype=torch.float32).normal_(generator=generator)
            tensor.copy_(tensor.float() + drawn * (self._noise * tensor.float().std(correction=0)))

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """Of the output tokens, on the host."""
        ids = torch.tensor([[*prompt, *output]], device=self.model.device)
        logits = self.model(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        chosen = ids[0, len(prompt) :, None]
        return logits.float().log_softmax(-1).gather(1, chosen)[:, 0].cpu()


def _in_order(folder: Path) -> list[Path]:
    found = [path.parent for path in folder.glob("*/config.json")]
    if not found:
        raise SystemExit(f"{folder} has no folders with a config.json")
    return sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


async def sampled(
    fleet: Fleet, policies: Policies, name: str, max_kv_lag: int | None, options: argparse.Namespace
) -> tuple[int, list[list[Chunk]]]:
    """The chunks of each stream while all policies were published, and the first one's version."""
    streams: list[list[Chunk]] = [[] for _ in range(options.streams)]
    arrived = asyncio.Event()
    version = (await fleet.newest_version() or 0) + 1
    publisher = Publisher(fleet, max_kv_lag=max_kv_lag)

    async def decode(number: int) -> None:
        sampling = Sampling(max_new_tokens=options.new_tokens, ignore_eos=True)
        prompt = options.prompts[number]
        async with contextlib.aclosing(fleet.stream(prompt, sampling)) as chunks:
            async for chunk in chunks:
                streams[number].append(chunk)
                arrived.set()
        raise SystemExit(f"{name}: a stream ended before the last publish: more --new-tokens")

    def behind(of: int) -> bool:
        return any(
            sum(len(c.token_ids) for c in chunks if c.weights.version == of) < options.every
            for chunks in streams
        )

    async with asyncio.TaskGroup() as tasks:
        running = []
        for number in range(policies.count + 1):
            policies.load(number)
            await publisher.publish_and_wait(version + number, policies.model.state_dict())
            if not running:
                running = [tasks.create_task(decode(i)) for i in range(options.streams)]
            while behind(version + number):
                arrived.clear()
                await arrived.wait()
        for task in running:
            task.cancel()
    return version, streams


def scored(
    policies: Policies, first: int, streams: list[list[Chunk]], options: argparse.Namespace
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the tokens under each policy but the first: the differences, and which of the tokens
    attended to older keys or values.
    """
    for number in range(1, policies.count + 1):
        policies.load(number)
        for prompt, chunks in zip(options.prompts, streams, strict=True):
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            expected = policies.logprobs(prompt, tokens)
            for chunk in chunks:
                if chunk.weights.version == first + number and chunk.token_ids:
                    end = chunk.offset + len(chunk.token_ids)
                    told = torch.tensor(chunk.logprobs)
                    is_old = chunk.oldest_kv_revision < chunk.weights.revision
                    drift = (told - expected[chunk.offset : end]).abs()
                    yield drift, torch.full_like(told, is_old)


async def measure(address: str, policies: Policies, options: argparse.Namespace) -> list[list[str]]:
    """A row a KV policy."""
    rows = []
    async with Fleet([address], timeouts=Timeouts(call=60)) as fleet:
        for name, max_kv_lag in options.policies:
            first, streams = await sampled(fleet, policies, name, max_kv_lag, options)
            parts = zip(*scored(policies, first, streams, options), strict=True)
            differences, old = map(torch.cat, parts)
            rows.append(
                [
                    name,
                    f"{len(differences):,}",
                    f"{old.mean():.1%}",
                    f"{differences.mean():.2e}",
                    f"{differences.max():.2e}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    add_kv_policies(parser)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: random weights")
    parser.add_argument("--checkpoints", type=Path, help="a folder of later checkpoints of it")
    parser.add_argument("--noise", type=float, default=1e-3, help="of each publish, relative")
    parser.add_argument("--publishes", type=int, default=6, help="without --checkpoints")
    parser.add_argument("--every", type=int, default=24, help="tokens of each stream, at least")
    parser.add_argument("--trainer", default="cpu", help="the trainer's device")
    parser.add_argument("--server", default="cpu", help="the server's device")
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--engine-arg", action="append", default=[], help="for sglang")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=3000, help="of a stream, at most")
    options = parse(parser)
    with contextlib.ExitStack() as stack:
        folder = options.model or stack.enter_context(checkpoint(options, options.trainer))
        policies = Policies(folder, options)
        vocab, draw = policies.model.config.vocab_size, random.Random(0)  # noqa: S311
        options.prompts = [
            [draw.randrange(vocab) for _ in range(options.prompt)] for _ in range(options.streams)
        ]
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (address,) = stack.enter_context(servers([_flags(folder, options)], work))
        rows = asyncio.run(measure(address, policies, options))
    changes = options.checkpoints or f"noise of {options.noise:g}"
    print(
        f"{machine(options.server)}, {options.engine}, {options.dtype}, {policies.count} publishes "
        f"of {changes}, {options.streams} streams after prompts of {options.prompt} tokens"
    )
    print_table([HEADER, *rows])


def _flags(folder: Path, options: argparse.Namespace) -> list[str]:
    flags = ["--engine", options.engine, "--model", str(folder), "--device", options.server]
    flags += ["--dtype", options.dtype, "--max-running", str(options.streams)]
    flags += ["--context-length", str(options.prompt + options.new_tokens + 1)]
    return flags + [f"--engine-arg={text}" for text in options.engine_arg]


if __name__ == "__main__":
    main()
