"""What benchmarks share: a model of random weights, servers, tables."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rollwire_transport import packed_nbytes, packed_views

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from rollwire_transport import Manifest

START_SECONDS = 400
"""A first start compiles kernels for minutes."""
STOP_SECONDS = 60

# The layers, sizes and dtype of Qwen2.5-7B, and of a model that a CPU decodes quickly.
SHAPES: dict[str, dict[str, int | str]] = {
    "7b": {
        "layers": 28,
        "hidden": 3584,
        "intermediate": 18944,
        "heads": 28,
        "kv_heads": 4,
        "vocab": 152064,
        "dtype": "bfloat16",
    },
    "tiny": {
        "layers": 2,
        "hidden": 256,
        "intermediate": 512,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 512,
        "dtype": "float32",
    },
}


KV_POLICIES = ["keep", "lag-1", "lag-4", "recompute"]


def add_kv_policies(parser: argparse.ArgumentParser) -> None:
    """``--policies``: what commits do with keys and values, by name."""
    parser.add_argument(
        "--policies",
        nargs="+",
        type=kv_policy,
        default=list(map(kv_policy, KV_POLICIES)),
        metavar="POLICY",
        help=f"keep, lag-N (a max_kv_lag), recompute; default: {' '.join(KV_POLICIES)}",
    )


def kv_policy(name: str) -> tuple[str, int | None]:
    """A name with its ``max_kv_lag``."""
    known = {"keep": None, "recompute": 0}
    return name, known[name] if name in known else int(name.removeprefix("lag-"))


def add_shape(parser: argparse.ArgumentParser) -> None:
    """``--shape``, ``--layers``, …, ``--checkpoint``: what ``checkpoint`` goes by."""
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    for name, value in SHAPES["7b"].items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), help="default: that of the shape")
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder where it is found, or else written and kept"
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with the shape's sizes where none are given."""
    options = parser.parse_args()
    for name, value in SHAPES[options.shape].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


@contextlib.contextmanager
def checkpoint(options: argparse.Namespace, device: str) -> Iterator[Path]:
    """A folder with the model, made on ``device``."""
    if (kept := options.checkpoint) is not None:
        if not (kept / "model.safetensors").exists():
            kept.mkdir(parents=True, exist_ok=True)
            write_checkpoint(kept, options, device)
        yield kept
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), options, device)
        yield Path(folder)


def write_checkpoint(folder: Path, options: argparse.Namespace, device: str) -> None:
    """Random weights of a Qwen2 shape."""
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=options.vocab,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written.update(architectures=["Qwen2ForCausalLM"], dtype=options.dtype)
    (folder / "config.json").write_text(json.dumps(written))
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in Qwen2ForCausalLM(config).state_dict().items()}
    dtype, generator = getattr(torch, options.dtype), torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        filled = tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02, generator=generator)
        tensors[name] = filled.cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def servers(
    commands: Sequence[Sequence[str]],
    folder: Path,
    environments: Sequence[Mapping[str, str]] | None = None,
) -> Iterator[list[str]]:
    """A rollwire-server for each list of flags; gives their addresses. Ends them all.

    ``environments`` adds variables, for each server its own.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for number, (flags, more) in enumerate(
            zip(commands, environments or [{}] * len(commands), strict=True)
        ):
            ready = folder / f"server-{number}.json"
            ready.unlink(missing_ok=True)
            command = [sys.executable, "-m", "rollwire_server", *flags]
            command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
            if "--log-level" not in flags:
                command += ["--log-level", "warning"]
            process = subprocess.Popen(command, env={**os.environ, **more})
            stack.callback(ended, process)
            started.append((process, ready))
        deadline = time.monotonic() + START_SECONDS
        for process, ready in started:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit(f"a server ended with {process.returncode} while it started")
                if time.monotonic() > deadline:
                    raise SystemExit(f"the servers did not start within {START_SECONDS} s")
                time.sleep(0.1)
        yield [json.loads(ready.read_text())["listen"] for _, ready in started]


def ended(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, by force if it takes too long."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns to the right; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def machine(device: str) -> str:
    """The name of what the figures are from."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return models[0].partition(": ")[2] if models else "an unknown CPU"


def staged(manifest: Manifest, device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for what a manifest sends, as servers lay it: in one, and touched."""
    sent = [spec for spec in manifest.tensors if spec.alias_of is None]
    return packed_views(sent, torch.zeros(packed_nbytes(sent), dtype=torch.uint8, device=device))
