"""A policy that says what a test chooses, behind a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
from rollwire_client.testing import FakeServer
from support.gateways import loaded_tokenizer, small_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from support.gateways import StartGateway

MODEL = "policy"
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]
END = "<|im_end|>"


@dataclass
class SpokenPolicy:
    """Answers with the same tokens, whatever it is asked."""

    tokenizer: Any
    client: openai.AsyncOpenAI
    server: FakeServer
    says: list[int]

    def say(self, text: str) -> None:
        self.says[:] = self.tokenizer.encode(text, add_special_tokens=False)

    async def ask(self, **options: Any) -> Any:
        """A chat that the end of a turn ends."""
        asked: dict[str, Any] = {
            "model": MODEL, "messages": MESSAGES, "max_tokens": len(self.says),
            "extra_body": {
                "return_token_ids": True,
                "stop_token_ids": [self.tokenizer.convert_tokens_to_ids(END)],
            },
        }  # fmt: skip
        return await self.client.chat.completions.create(**asked | options)


@contextlib.asynccontextmanager
async def spoken_policy(start_gateway: StartGateway, folder: Path) -> AsyncIterator[SpokenPolicy]:
    small_tokenizer(folder, tools=True)
    says: list[int] = [0]

    def sample(_: Sequence[int], output: Sequence[int]) -> int:
        return says[min(len(output), len(says) - 1)]

    async with FakeServer(sample, vocab_size=1000, version=1) as server:
        gateway = await asyncio.to_thread(
            start_gateway, server.address, "--tokenizer", str(folder), "--renderer", "qwen3",
            "--model-name", MODEL, "--stream-interval", "0",
        )  # fmt: skip
        url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            yield SpokenPolicy(loaded_tokenizer(folder), client, server, says)
