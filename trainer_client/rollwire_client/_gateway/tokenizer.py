"""Text and token ids: the model's tokenizer and its chat template, off the event loop."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from rollwire_client._detokenizer import Detokenizer
from rollwire_client._errors import MissingDependencyError
from rollwire_client._gateway.errors import invalid
from rollwire_client._gateway.messages import ControlTokens, arguments_as_text, checked_message
from rollwire_client.chat import parse_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire_client._trajectory import Trajectory
    from rollwire_client.chat import ParsedMessage

T = TypeVar("T")
Messages = list[dict[str, Any]]


class ChatTokenizer:
    """A tokenizer of Hugging Face's, used by one thread beside the event loop.

    Text is decoded as a whole, or by a ``Detokenizer``; decodes of single tokens are never joined.
    """

    def __init__(self, inner: Any, renderer: Any = None) -> None:
        """``renderer``: of PyPI's ``renderers``; it finds the calls of tools in an output."""
        self._inner = inner
        self._renderer = renderer
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._arguments_as_text = arguments_as_text(inner)
        self._control_tokens = ControlTokens(inner)

    @classmethod
    def load(cls, folder: str, renderer: str | None = None) -> ChatTokenizer:
        """``renderer``: name of the model's renderer, such as "qwen3".

        Raises:
            MissingDependencyError: A renderer needs a package that is not installed.
            OSError, ValueError: There is no such tokenizer or renderer.
        """
        from transformers import AutoTokenizer

        inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return cls(inner, None if renderer is None else _renderer(renderer, inner))

    @property
    def parses_tools(self) -> bool:
        return self._renderer is not None

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """``special_tokens``: whether the tokenizer adds its own, such as the BOS token."""

        def encode() -> list[int]:
            return list(self._inner.encode(text, add_special_tokens=special_tokens))

        return await self._run(encode)

    async def render(
        self,
        messages: Messages,
        tools: list[Any] | None,
        settings: dict[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> list[int]:
        """The token ids of a chat by the model's template; a template that writes the BOS token
        gets no second one.
        """
        checked = [
            checked_message(number, message, as_text=self._arguments_as_text)
            for number, message in enumerate(messages)
        ]

        def render() -> list[int]:
            marked, hidden = self._control_tokens.hide(checked)
            text = self._inner.apply_chat_template(
                marked,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **settings,
            )
            return self._control_tokens.encode(text, hidden)

        try:
            return await self._run(render)
        except Exception as error:  # a template is a program, and it is the model's
            raise invalid(f"the chat template refuses these messages: {error}", "messages") from (
                error
            )

    def detokenizer(
        self, stop: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        return Detokenizer(self._decoder(skip_special_tokens=skip_special_tokens), stop)

    async def text(self, trajectory: Trajectory, *, skip_special_tokens: bool) -> str:
        """The text of an output, before the token or string that ended it."""
        if trajectory.text is not None:
            return trajectory.text
        finish = trajectory.finish
        shown = list(trajectory.token_ids)
        if finish is not None and finish.stop_token_id is not None:
            shown.pop()
        decode = self._decoder(skip_special_tokens=skip_special_tokens)
        return await self._run(lambda: decode(shown))

    async def message(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: list[Any]
    ) -> ParsedMessage:
        """What the policy says, thinks and calls in an output of a chat."""
        prompt, output = list(prompt_ids), list(token_ids)
        return await self._run(lambda: parse_message(self._renderer, prompt, output, tools))

    @functools.lru_cache(maxsize=1 << 18)  # noqa: B019 - it lives as long as the process
    def token(self, token_id: int) -> str:
        """The text of one token, as log-probabilities name it."""
        text: str = self._decoder(skip_special_tokens=False)([token_id])
        return text

    def _decoder(self, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
        return functools.partial(
            self._inner.decode,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def _renderer(name: str, inner: Any) -> Any:
    try:
        from pydantic import TypeAdapter
        from renderers import RendererConfig, create_renderer
    except ImportError as error:
        raise MissingDependencyError(
            f"calls of tools need {error.name}: pip install 'rollwire[gateway,tools]'"
        ) from error
    return create_renderer(inner, TypeAdapter(RendererConfig).validate_python({"name": name}))
