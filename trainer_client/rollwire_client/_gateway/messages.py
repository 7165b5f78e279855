"""Messages of a chat, as chat templates want them."""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any

from rollwire_client._gateway.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FROM_OUTSIDE = {"user", "tool"}
_PROBED = "rollwire"  # in the arguments of a call that a template is tried with


def checked_message(number: int, message: Any, *, as_text: bool) -> dict[str, Any]:
    """A message as templates want it."""
    path = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise invalid(
            f"{path} is not a message with a role of {', '.join(sorted(_ROLES))}", "messages"
        )
    made = {name: value for name, value in message.items() if value is not None}
    made["content"] = _text_content(path, message.get("content"))
    if calls := made.get("tool_calls"):
        if not isinstance(calls, list):
            raise invalid(f"{path}.tool_calls is not a list", "messages")
        made["tool_calls"] = [
            _checked_call(f"{path}.tool_calls[{index}]", call, as_text=as_text)
            for index, call in enumerate(calls)
        ]
    return made


def _text_content(path: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"{path}.content is neither a text nor a list of parts", "messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise invalid(f"{path}.content has a part that is not text", "messages")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{path}.content has a text part without its text", "messages")
    return "".join(part["text"] for part in content)


def _checked_call(path: str, call: Any, *, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{path} is not a call of a function", "messages")
    arguments = function.get("arguments", "{}")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = None  # the policy may have written no JSON; a template shows it as it is
    if not as_text and isinstance(parsed, dict):
        arguments = parsed
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_as_text(inner: Any) -> bool:
    """Whether the template writes the arguments of calls as they are (DeepSeek's) instead of
    converting a mapping to JSON itself (Qwen's). OpenAI's API has them as text.
    """

    def rendered(arguments: Any) -> str:
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        }
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return str(inner.apply_chat_template(messages, tokenize=False))
        except Exception:
            return ""

    if not getattr(inner, "chat_template", None):
        return False
    mapping = rendered({_PROBED: 1})
    return f'{{"{_PROBED}": 1}}' not in mapping and f'{{"{_PROBED}": 1}}' in rendered(
        f'{{"{_PROBED}": 1}}'
    )


class ControlTokens:
    """Keeps what looks like a control token in the text of a message from becoming one: a web page
    that a tool returns must not end the turn.

    Before the template is applied, marks take the place of such texts; after it, each is encoded
    as the text that it is. Users and tools can write none of the tokenizer's added tokens. Other
    roles can write those that mark no turns, such as "<think>".
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        added = list(getattr(inner, "added_tokens_decoder", {}).values())
        self._special = _pattern([token.content for token in added if token.special])
        self._added = _pattern([token.content for token in added])

    def hide(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """The messages with marks; what all marks have in them, and the text of each."""
        nonce = secrets.token_hex(8)  # which no message can have
        hidden = [nonce]

        def mark(found: re.Match[str]) -> str:
            hidden.append(found[0])
            return f"\ue000{nonce}:{len(hidden) - 1}\ue001"

        made = []
        for message in messages:
            pattern = self._added if message["role"] in _FROM_OUTSIDE else self._special
            content = message["content"]
            made.append({**message, "content": pattern.sub(mark, content) if pattern else content})
        return made, hidden

    def encode(self, rendered: str, hidden: Sequence[str]) -> list[int]:
        """The token ids of what a template made of messages with marks."""
        parts = re.split(f"\ue000{hidden[0]}:([0-9]+)\ue001", rendered)
        ids: list[int] = []
        for number, part in enumerate(parts):
            # Cut after its first character, a control token is none.
            texts = [part] if number % 2 == 0 else _halves(hidden[int(part)])
            for text in filter(None, texts):
                ids += self._inner.encode(text, add_special_tokens=False)
        return ids


def _halves(text: str) -> list[str]:
    return [text[:1], text[1:]]


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
