"""Token ids -> text that is safe to show, token by token, and the search for stop strings.

Three things make this more than ``decode`` of each token:

* a character may be spread over tokens: it is held back until its last byte is there;
* a stop string may be spread over tokens: text that could be its beginning is held back;
* decoding everything again at each token costs O(n²): here a token costs its own length.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

_PATIENCE = 8  # tokens; a UTF-8 character has at most 4 bytes, so by then it is not unfinished but broken


class DecodesTokens(Protocol):
    """What is needed of a tokenizer (``nanoengine.tokenizer.tokenizer.Tokenizer`` has it)."""

    is_byte_level: bool
    special_ids: frozenset[int]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes | None: ...


class _ByteDecoder:
    """Exact for byte-level vocabularies: bytes in, every finished character out."""

    def __init__(self, tokenizer: DecodesTokens, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decode(self._bytes_of(token_id) or b"")


class _OffsetDecoder:
    """For other vocabularies (SentencePiece): what the last few tokens add to those before them.

    A token's text may depend on its neighbours (a leading space, byte pieces), so a window is
    decoded: the tokens that gave the last text, and the pending ones. Both are a few tokens.
    """

    def __init__(self, tokenizer: DecodesTokens, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:  # must not become context: the next token would lose its leading space
            return ""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        unfinished = text.endswith("\ufffd") or len(text) <= len(self._context_text)
        if unfinished and len(self._pending) < _PATIENCE:
            return ""
        new = text[len(self._context_text) :]
        if new:  # tokens without text are no context: they would not keep the next one's leading space
            self._context = self._pending
            self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=False)
        self._pending = []
        return new


class IncrementalDetokenizer:
    """The text of one request, as its tokens arrive.

    stop: strings that end the text and are not part of it. A stop string counts when its last
    character arrives with token number ``min_tokens`` or later (counted from 1). Of several the one
    that is complete first counts, and of those complete at the same character the longest: so the
    result does not depend on how the text is cut into tokens.

    Errors: ValueError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: DecodesTokens,
        *,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(self._stop):
            raise ValueError(f"a stop string must not be empty, got {self._stop!r}")
        self._min_tokens = min_tokens
        decoder = _ByteDecoder if tokenizer.is_byte_level else _OffsetDecoder
        self._decode = decoder(tokenizer, skip_special_tokens).push
        self._beginnings = {s[:n] for s in self._stop for n in range(1, len(s))}
        self._endings = {s[-1] for s in self._beginnings}
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._num_tokens = 0
        self._taken: list[str] = []
        self._new: list[str] = []
        self.matched: str | None = None

    @property
    def text(self) -> str:
        """All text that is safe to show so far: nothing of it will be taken back."""
        self._taken = ["".join(self._taken)]
        return self._taken[0] + "".join(self._new)

    def take(self) -> str:
        """What ``text`` has gained since the last call: for streaming, at the cost of the new part only."""
        new = "".join(self._new)
        if new:
            self._taken.append(new)
            self._new = []
        return new

    def push(self, token_id: int) -> str | None:
        """Add one token; the stop string that ends the text, or None. After a match nothing is added."""
        if self.matched is not None:
            return self.matched
        self._num_tokens += 1
        piece = self._decode(token_id)
        if not piece:
            return None
        if not self._stop:
            self._new.append(piece)
            return None
        window = self._held + piece
        begin = self._search(window) if self._num_tokens >= self._min_tokens else None
        self._show(window, len(window) - self._num_possible(window) if begin is None else begin)
        if begin is not None:
            self._held = ""
        return self.matched

    def finish(self) -> None:
        """No more tokens: show what a stop string held back. Half a character is dropped."""
        self._show(self._held, len(self._held))

    def _show(self, window: str, length: int) -> None:
        if length:
            self._new.append(window[:length])
        self._held = window[length:]

    def _search(self, window: str) -> int | None:
        """Where the stop string begins that is complete first; sets ``matched``.

        Looks only at matches whose end is new: of the held-back text all was searched before, or
        came before ``min_tokens``. Released text cannot be part of a match, or it would be held.
        """
        best: tuple[int, int] | None = None
        for stop in self._stop:
            begin = window.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best):
                best, self.matched = (begin + len(stop), begin), stop
        return None if best is None else best[1]

    def _num_possible(self, window: str) -> int:
        """Length of the longest end of ``window`` that could be the beginning of a stop string."""
        if window[-1] not in self._endings:
            return 0
        lengths = range(min(self._longest - 1, len(window)), 0, -1)
        return next((n for n in lengths if window[-n:] in self._beginnings), 0)


def detokenize(tokenizer: DecodesTokens, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of a whole list: what pushing one by one and ``finish`` give, without half a character at the end."""
    if tokenizer.is_byte_level:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        data = b"".join(tokenizer.token_bytes(i) or b"" for i in ids if i not in skipped)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    decoder = _OffsetDecoder(tokenizer, skip_special_tokens)
    return "".join(decoder.push(i) for i in ids)
