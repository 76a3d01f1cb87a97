"""Which part of a text each of its tokens has made: for logprobs, whose entries name the bytes of
their token.

The text is the detokenizer's. A token may hold a piece of a character, which is then shared by
several tokens, and in a SentencePiece vocabulary what a token adds depends on its neighbours.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Protocol

from nanoengine.model.detokenizer import DecodesTokens, _OffsetDecoder


class NamesTokens(DecodesTokens, Protocol):
    """What is needed of a tokenizer (``nanoengine.model.tokenizer.Tokenizer`` has it)."""

    def token_text(self, token_id: int) -> str: ...


@dataclass(slots=True)
class TokenPart:
    """start: the character of the text that the token's first byte belongs to, or before which it
    stands if it has no bytes. data: its bytes of the text's UTF-8, as they came where they make no
    character. chars: for each of them, the character that it belongs to. known: False while the
    text does not say yet.
    """

    token_id: int
    start: int
    data: bytes = b""
    chars: list[int] = field(default_factory=list)
    known: bool = True

    def lies_in(self, length: int) -> bool:
        """True if the first ``length`` characters hold all of it."""
        return self.known and (not self.chars or self.chars[-1] < length)

    def bytes_in(self, length: int) -> bytes:
        """Those of its bytes that belong to the first ``length`` characters."""
        return bytes(b for b, char in zip(self.data, self.chars, strict=True) if char < length)

    def name(self, tokenizer: NamesTokens) -> str:
        """What the token adds to the text; if that is no text of its own, its bytes: bytes:\\xe4.

        A token that adds nothing (one that is left out of the text) goes by its own text.
        """
        return bytes_or_text(self.data) if self.data else tokenizer.token_text(self.token_id)


def bytes_or_text(data: bytes) -> str:
    """The text that bytes are, or ``bytes:\\xe4`` as OpenAI's API writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def make_parts(
    tokenizer: NamesTokens, skip_special_tokens: bool = True
) -> _ByteParts | _OffsetParts:
    """An object whose ``push`` takes the tokens of one text in order and returns each one's
    TokenPart.

    A part may become ``known`` only with a later token. skip_special_tokens: as in the text's own
    detokenizer.
    """
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    kind = _ByteParts if tokenizer.is_byte_level else _OffsetParts
    return kind(tokenizer, skipped)


class _ByteParts:
    """For byte-level vocabularies: byte by byte through the decoder that makes the text."""

    def __init__(self, tokenizer: NamesTokens, skipped: frozenset[int]) -> None:
        self._bytes_of, self._skipped = tokenizer.token_bytes, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0  # finished characters

    def push(self, token_id: int) -> TokenPart:
        data = b"" if token_id in self._skipped else self._bytes_of(token_id) or b""
        part = TokenPart(token_id, self._count, data)
        for byte in data:
            self._count += len(self._decoder.decode(bytes([byte])))
            unfinished = bool(self._decoder.getstate()[0])
            part.chars.append(self._count if unfinished else self._count - 1)
        if part.chars:
            part.start = part.chars[0]
        return part


class _OffsetParts:
    """For other vocabularies: by what each token changes in the text of its group.

    A group is what the decoder holds back and then lets out at once: the tokens of one character,
    mostly.
    """

    def __init__(self, tokenizer: NamesTokens, skipped: frozenset[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._decoder = _OffsetDecoder(
            tokenizer, skip_special_tokens=False
        )  # those to skip do not come here
        self._count = 0
        self._group: list[TokenPart] = []
        self._texts: list[str] = []  # of the group's first token, of its first two, ...
        self._between: list[
            tuple[TokenPart, int]
        ] = []  # skipped tokens, and how many of the group stand before each

    def push(self, token_id: int) -> TokenPart:
        part = TokenPart(token_id, self._count)
        if token_id in self._skipped:
            if self._group:
                part.known = False
                self._between.append((part, len(self._group)))
            return part
        context, before = self._decoder._context, len(self._decoder._context_text)
        part.known = False
        self._group.append(part)
        ids = context + [each.token_id for each in self._group]
        self._texts.append(self._tokenizer.decode(ids, skip_special_tokens=False)[before:])
        piece = self._decoder.push(token_id)
        if not self._decoder._pending:
            self._share(piece)
        return part

    def _share(self, piece: str) -> None:
        """Each token of the group begins where the text that came before it stays as it was."""
        begins = [0]
        for text in self._texts[:-1]:
            begins.append(max(begins[-1], _common(text, piece)))
        for part, begin, end in zip(self._group, begins, [*begins[1:], len(piece)], strict=True):
            part.start, part.known = self._count + begin, True
            byte = self._tokenizer.token_bytes(part.token_id)
            if byte is not None and (
                byte >= b"\x80" or begin < end
            ):  # else a blank that the decoder strips
                part.data, part.chars = byte, [part.start] * len(byte)
                continue
            for i, character in enumerate(piece[begin:end]):
                encoded = character.encode("utf-8", "replace")
                part.data += encoded
                part.chars += [part.start + i] * len(encoded)
        for part, before in self._between:
            part.start, part.known = self._count + begins[before], True
        self._count += len(piece)
        self._group, self._texts, self._between = [], [], []


def _common(one: str, other: str) -> int:
    """Length of the longest common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def write_out(parts: list[TokenPart], stop: str, length: int, tokenizer: NamesTokens) -> None:
    """Correct the parts of a text of ``length`` characters that ends with the stop string ``stop``.

    Where it holds special tokens that are left out of the text elsewhere, they get the bytes that
    they have in it, what follows them moves back, and what came after it lies beyond the text.
    """
    pieces = [
        part.data
        or (tokenizer.token_text(part.token_id).encode() if part.token_id in tokenizer.special_ids else b"")
        for part in parts
    ]
    written, wanted = b"".join(pieces), stop.encode("utf-8", "replace")
    newest = len(pieces[-1]) if pieces else 0
    at = written.find(wanted, max(0, len(written) - newest - len(wanted) + 1))
    if at < 0:  # it was found in the text without the special tokens
        return
    places = [length - len(stop) + i for i, c in enumerate(stop) for _ in c.encode("utf-8", "replace")]
    end = 0
    for part, piece in zip(parts, pieces, strict=True):
        begin, end = end, end + len(piece)
        inside = piece[max(0, at - begin) :]
        if not inside:
            continue
        before = len(part.data) - len(inside) if part.data else 0
        first = max(0, begin - at)
        chars = places[first : first + len(inside)]
        part.data = part.data[:before] + inside
        part.chars = part.chars[:before] + chars + [length] * (len(inside) - len(chars))
        part.start = part.chars[0]
