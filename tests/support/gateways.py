"""Real ``rollwire gateway`` processes, and a small tokenizer for them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from support.programs import ROLLWIRE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    StartGateway = Callable[..., "GatewayProcess"]

START_SECONDS = 120
STOP_SECONDS = 60

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class GatewayProcess:
    """A ``rollwire gateway`` that listens."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    metrics_address: str | None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        return self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def gateways(folder: Path) -> Iterator[StartGateway]:
    """Starts gateways on request; whatever still runs at the end is killed, and its log is read."""
    started: list[GatewayProcess] = []

    def start(*arguments: str) -> GatewayProcess:
        number = len(started)
        ready, log = folder / f"gateway-{number}.json", folder / f"gateway-{number}.log"
        flags = ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*ROLLWIRE, "gateway", *flags, *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
            )
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                pytest.fail(f"the gateway did not come up:\n{log.read_text()}")
            time.sleep(0.02)
        told = json.loads(ready.read_text())
        started.append(GatewayProcess(process, told["listen"], log, told["metrics_listen"]))
        return started[-1]

    try:
        yield start
    finally:
        for gateway in started:
            if gateway.process.poll() is None:
                gateway.process.kill()
                gateway.process.wait()
    for gateway in started:
        text = gateway.log.read_text()
        assert "Traceback" not in text, text
        assert "never retrieved" not in text, text


TOOL_TOKENS = ["tool_call", "think", "tool_response"]


def small_tokenizer(
    folder: Path, *, template: str = CHATML, bos: bool = False, tools: bool = False
) -> Path:
    """A byte-level tokenizer of 512 tokens: characters may be split over tokens. ``tools``: with
    Qwen's tokens for calls and thoughts besides.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[AddedToken(text, special=True) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["".join(chr(97 + (i * j) % 26) for j in range(1, 40)) for i in range(1, 400)]
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == 512
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",  # noqa: S106
        eos_token="<|im_end|>",  # noqa: S106
        clean_up_tokenization_spaces=False,
    )
    if tools:
        made.add_tokens([AddedToken(f"<{end}{name}>") for name in TOOL_TOKENS for end in ("", "/")])
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def loaded_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)
