"""The text of a sequence while it is sampled, and the strings that end it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what decoders make of bytes that are no character, or none yet
_CHARACTER_BYTES = 4  # at most, in UTF-8
_WINDOW = 32  # tokens that are decoded again with each new one
_LONGEST_WINDOW = 256  # if their text never ends with a whole character


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """Makes text of a sequence's output while it is sampled, and ends it at a stop string.

    The strings are searched in the text, whatever its tokens: a stop string may begin and end
    within tokens. The output keeps the tokens up to the one that completes a stop string, as the
    policy sampled them, with their log-probabilities: ``len(trajectory.token_ids)``, which
    ``finish.output_tokens`` repeats. ``trajectory.text`` ends before the stop string, or before the
    token that ended the sequence if ``finish.stop_token_id`` says that one did. If several stop
    strings are complete at the same token, the one that begins first counts, and of these the
    longest. Before ``Sampling.min_new_tokens`` no string ends a sequence.

    Servers know no text. Once the client finds a stop string it aborts the sequence and drops the
    tokens after it; ``finish.reason`` is ``FinishReason.STOP``, and its ``cached_prompt_tokens``
    is 0. Only the output is searched, not the prompt.

    Attributes:
        decode: Returns the text of a list of token ids, such as a tokenizer's ``decode``. Appended
            tokens should not change the text before them, except for an incomplete character
            (U+FFFD) at its end: pass ``clean_up_tokenization_spaces=False`` to Hugging Face's. It
            is called in the event loop, for each message a few times, with some 64 tokens.
        stop: The strings that end a sequence; none if only the text is wanted.

    Raises:
        TypeError, ValueError: ``stop`` is a single text, or one of its strings is empty.
    """

    decode: Callable[[list[int]], str]
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not callable(self.decode):
            raise TypeError(
                f"decode is {self.decode!r:.80}, not a function: use for example tokenizer.decode"
            )
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise TypeError(f"stop is {self.stop!r:.80}, not a list of texts")
        if not all(self.stop):
            raise ValueError("stop has an empty text, which would end every sequence")
        object.__setattr__(self, "stop", tuple(self.stop))


class TextBuilder:
    """The text of a sequence's output, to which tokens are appended.

    Only a window of the last tokens is decoded again. Its first ones are context, whose text is
    known already: some tokenizers write a token differently at the beginning of a text. Strings and
    positions are relative to the text that was taken and dropped, so that no step looks at the
    whole of a long output. ``take`` is called after each ``append``.
    """

    def __init__(self, detokenizer: Detokenizer, min_tokens: int) -> None:
        self.stop_string: str | None = None  # that ended the text
        self._decode = detokenizer.decode
        self._stop = tuple(detokenizer.stop)
        self._longest = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._parts: list[str] = []  # what was taken
        self._known = ""  # of the tokens before those of the window that are no context
        self._window: list[int] = []
        self._context = 0  # tokens of the window
        self._context_text = ""
        self._end: str | None = None  # the text, once the sequence has ended
        self._taken = 0

    @property
    def text(self) -> str:
        """All of it, as far as it has come: what was taken, and the rest."""
        try:
            text = self._all_text() if self._end is None else self._end
        except Exception:  # of the caller's function: the next ``take`` or ``end`` raises it
            text = ""
        return "".join(self._parts) + text[self._taken :]

    def skip(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that came before, and end nothing."""
        self._append(token_ids)
        self.take()

    def append(self, token_ids: Sequence[int]) -> int:
        """Appends tokens; returns how many of them belong to the sequence: those after a stop
        string do not.
        """
        first = max(self._min_tokens - self._tokens, 1)  # of these that may complete one
        if self._stop and first <= len(token_ids):
            before = len(self._whole_text(token_ids[: first - 1]))
            if self._find(self._whole_text(token_ids), before) is not None:
                for count in range(first, len(token_ids) + 1):
                    text = self._whole_text(token_ids[:count])
                    if (found := self._find(text, before)) is not None:
                        position, self.stop_string = found
                        self._end = text[:position]
                        return count
        self._append(token_ids)
        return len(token_ids)

    def end(self, *, hides_last: bool) -> None:
        """The sequence has ended; its last token may be no text."""
        if self._end is None:
            self._end = self._all_text(hidden=int(hides_last))

    def take(self) -> str:
        """The text that was not taken yet, and that no further token can change or make a part of a
        stop string. That of the last token is kept until it is known whether it is text.
        """
        shown = self._shown()
        new = shown[self._taken :]
        self._taken = max(self._taken, len(shown))
        self._parts.append(new)
        if self._end is None:  # else the text is not shortened any more
            self._shorten()
        return new

    def _shown(self) -> str:
        if self._end is not None:
            return self._end
        text = self._whole_text(hidden=1)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return text[:-length]
        return text

    def _text(self, count: int, token_ids: Sequence[int] = ()) -> str:
        """The text up to so many tokens, of those of the window and these."""
        if count <= self._context:
            return self._known
        window = [*self._window, *token_ids]
        return self._known + self._decode(window[:count])[len(self._context_text) :]

    def _whole_text(self, token_ids: Sequence[int] = (), *, hidden: int = 0) -> str:
        """The same, without the last ``hidden`` tokens, and up to the last whole character."""
        count = len(self._window) + len(token_ids) - hidden
        text = full = self._text(count, token_ids)
        # Some decoders make U+FFFD of whole characters too, if bytes follow that are none yet.
        for fewer in range(1, _CHARACTER_BYTES):
            if not text.endswith(_INCOMPLETE):
                return text
            text = self._text(count - fewer, token_ids)
        return full.rstrip(_INCOMPLETE) if text.endswith(_INCOMPLETE) else text

    def _all_text(self, *, hidden: int = 0) -> str:
        """The same, with what it ends in if that is no whole character."""
        whole, text = self._whole_text(hidden=hidden), self._text(len(self._window) - hidden)
        return text if text.startswith(whole) else whole + _INCOMPLETE

    def _context_start(self, text: str, count: int) -> int | None:
        """Where in the window the next context may begin, of which ``text`` is up to ``count``.

        Not within a character: some decoders then make U+FFFD of all bytes that follow, whole
        characters included.
        """
        latest = count - _WINDOW
        for start in range(latest, max(latest - _CHARACTER_BYTES, -1), -1):
            context = self._decode(self._window[start:count])
            if not context.startswith(_INCOMPLETE) or text.endswith(context):
                return start
        return None

    def _find(self, text: str, before: int) -> tuple[int, str] | None:
        """The first stop string that ends after so many characters, and where it begins."""
        places = [(text.find(s, max(before - len(s) + 1, 0)), -len(s), s) for s in self._stop]
        found = min((place for place in places if place[0] >= 0), default=None)
        return None if found is None else (found[0], found[2])

    def _append(self, token_ids: Sequence[int]) -> None:
        self._window += token_ids
        self._tokens += len(token_ids)

    def _shorten(self) -> None:
        """Drops tokens and text that no later step needs."""
        count = len(self._window) - 1
        if count - self._context < _WINDOW:
            return
        text = self._decode(self._window[:count])
        known = self._known + text[len(self._context_text) :]
        start = None if known.endswith(_INCOMPLETE) else self._context_start(text, count)
        if start is None:
            if count - self._context < _LONGEST_WINDOW:
                return
            start = count - _WINDOW
        self._window = self._window[start:]
        self._context = count - start
        self._context_text = self._decode(self._window[: self._context])
        done = max(min(len(known) - self._longest, self._taken), 0)
        self._known = known[done:]
        self._taken -= done
