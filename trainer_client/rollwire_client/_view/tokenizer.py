"""The text of token ids, from the tokenizer.json of a checkpoint.

A token may be part of a character, which no decoder of single tokens can say. So tokens become
bytes, as the file's own decoder would join them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollwire_client._errors import RollwireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"  # of SentencePiece


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What each token id stands for.

    Attributes:
        pieces: The bytes of each token.
        special: Ids of special tokens, such as the end of a sequence.
    """

    pieces: Mapping[int, bytes]
    special: frozenset[int]


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's folder, or of a tokenizer.json; nothing in it is executed.

    Raises:
        RollwireError: It cannot be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise RollwireError(
            f"{file} does not exist: save the tokenizer in this format, with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…), or leave --tokenizer out"
        ) from None
    except OSError as error:
        raise RollwireError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RollwireError(f"{file} is not JSON: {error}; save the tokenizer again") from error
    try:
        return _tokenizer(content)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise RollwireError(
            f"{file} is not a tokenizer that Hugging Face's tokenizers saved ({error!r}): give the "
            "folder of a checkpoint, or leave --tokenizer out"
        ) from error


def _tokenizer(content: dict[str, Any]) -> Tokenizer:
    to_bytes = _decoder(content.get("decoder"))
    pieces = {index: to_bytes(piece) for piece, index in _vocabulary(content["model"]).items()}
    added = content.get("added_tokens") or []
    pieces |= {int(token["id"]): token["content"].encode() for token in added}
    return Tokenizer(pieces, frozenset(int(token["id"]) for token in added if token["special"]))


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """By token; a Unigram model has a list of tokens and their scores."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {piece: index for index, (piece, _) in enumerate(vocabulary)}
    return {str(piece): int(index) for piece, index in vocabulary.items()}


def _decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    steps = [] if decoder is None else decoder.get("decoders") or [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "ByteFallback"}:
        return _sentence_piece
    for step in steps:
        if step["type"] == "WordPiece":
            prefix = str(step["prefix"])
            return lambda piece: _word_piece(piece, prefix)
        if step["type"] == "BPEDecoder":
            suffix = str(step["suffix"])
            return lambda piece: piece.replace(suffix, " ").encode()
    return str.encode


def _byte_level(piece: str) -> bytes:
    """As GPT-2 writes bytes: each as a character that can be seen."""
    return b"".join(_BYTE_OF_CHARACTER.get(c, c.encode()) for c in piece)


def _bytes_of_characters() -> dict[str, bytes]:
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    characters = [*map(chr, seen), *(chr(256 + place) for place in range(len(unseen)))]
    return {c: bytes([byte]) for c, byte in zip(characters, [*seen, *unseen], strict=True)}


_BYTE_OF_CHARACTER = _bytes_of_characters()


def _sentence_piece(piece: str) -> bytes:
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_WORD_START, " ").encode()


def _word_piece(piece: str, prefix: str) -> bytes:
    return (piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}").encode()
