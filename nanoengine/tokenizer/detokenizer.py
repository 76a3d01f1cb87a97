"""Token ids -> text that is safe to show, token by token, and the search for stop strings.

Three things make this more than ``decode`` of each token:

* a character may be spread over tokens: it is held back until its last byte is there;
* a stop string may be spread over tokens: text that could be its beginning is held back;
* decoding everything again at each token costs O(n²): here a token costs its own length.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from nanoengine.sampling_params import SamplingParams

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

    stop: strings that end the text. They are not part of it, unless include_stop_str_in_output is
    True: then the text ends with the one that was found. A stop string counts when its last
    character arrives with token number ``min_tokens`` or later (counted from 1). Of several the one
    that is complete first counts, and of those complete at the same character the longest: so the
    result does not depend on how the text is cut into tokens.

    A stop string that holds the whole text of a special token is also looked for in the text with
    all special tokens written out. So "<|im_end|>" and "a<|im_end|>" are found where
    skip_special_tokens leaves the token out of the text, but "end" is not found inside its name.

    Errors: ValueError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: DecodesTokens,
        *,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(self._stop):
            raise ValueError(f"a stop string must not be empty, got {self._stop!r}")
        self._min_tokens = min_tokens
        decoder = _ByteDecoder if tokenizer.is_byte_level else _OffsetDecoder
        self._decode = decoder(tokenizer, skip_special_tokens).push
        self._include_stop = include_stop_str_in_output
        self._special = _special_texts(tokenizer) if self._stop and skip_special_tokens else {}
        written_out = [s for s in self._stop if any(text in s for text in self._special.values())]
        self._shown = _Window(self._stop)
        self._written = _Window(written_out) if written_out else None
        self._length = 0  # of the text so far, held-back characters included
        self._held = ""
        self._num_tokens = 0
        self._taken: list[str] = []
        self._new: list[str] = []
        self.matched: str | None = None

    @classmethod
    def of(cls, tokenizer: DecodesTokens, params: SamplingParams) -> IncrementalDetokenizer:
        """One that does what the params ask of the text."""
        return cls(
            tokenizer,
            stop=params.stop,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )

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
        if not self._stop:
            if piece:
                self._new.append(piece)
            return None
        hidden = self._special.get(token_id, "") if self._written is not None else ""
        if piece or hidden:
            self._add(piece, hidden)
        return self.matched

    def finish(self) -> None:
        """No more tokens: show what a stop string held back. Half a character is dropped."""
        self._show(len(self._held))

    def _add(self, piece: str, hidden: str) -> None:
        """Look for stop strings in a token's text; hidden: that of a special token that is left out."""
        self._held += piece
        self._length += len(piece)
        may_end = self._num_tokens >= self._min_tokens
        found = [self._shown.push(piece, True, may_end, self._length)] if piece else []
        if self._written is not None:
            found.append(self._written.push(piece or hidden, not hidden, may_end, self._length))
        matches = [match for match in found if match is not None]
        if not matches:
            safe = self._shown.safe_length(self._length)
            if self._written is not None:
                safe = min(safe, self._written.safe_length(self._length))
            self._show(safe - self._shown_length())
            return
        best = min(matches, key=lambda match: (match.end, -len(match.stop)))
        self.matched = best.stop
        self._show(best.begin - self._shown_length())
        self._held = ""
        if self._include_stop:
            self._new.append(best.stop)

    def _shown_length(self) -> int:
        return self._length - len(self._held)

    def _show(self, length: int) -> None:
        """Let out the first ``length`` characters that are held back."""
        if length > 0:
            self._new.append(self._held[:length])
            self._held = self._held[length:]


class _Match(NamedTuple):
    """end: characters of the newest piece up to the match's end. begin: length of the shown text
    before the match."""

    end: int
    begin: int
    stop: str


class _Window:
    """The end of a text that could be the beginning of a stop string, and the search for them.

    The text may hold more than what is shown: special tokens that are left out there. So each
    character knows how long the shown text is before it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._beginnings = {s[:n] for s in stop for n in range(1, len(s))}
        self._endings = {s[-1] for s in self._beginnings}
        self._longest = max(map(len, stop), default=0)
        self._text = ""
        self._shown_before: list[int] = []

    def push(self, piece: str, shown: bool, may_end: bool, length: int) -> _Match | None:
        """Add ``piece`` and return the match that is complete first, if one may be.

        length: of the shown text, with the piece if that is ``shown``.
        """
        old, start = len(self._text), length - len(piece) if shown else length
        self._text += piece
        self._shown_before += range(start, length) if shown else [length] * len(piece)
        match = self._search(old) if may_end else None
        keep = self._num_possible()
        self._text = self._text[len(self._text) - keep :]
        self._shown_before = self._shown_before[len(self._shown_before) - keep :]
        return match

    def safe_length(self, length: int) -> int:
        """How much of the shown text cannot be part of a match any more."""
        return self._shown_before[0] if self._shown_before else length

    def _search(self, old: int) -> _Match | None:
        """Looks only at matches whose end is new: the rest was searched, or came before min_tokens."""
        best: _Match | None = None
        for stop in self._stop:
            begin = self._text.find(stop, max(0, old - len(stop) + 1))
            if begin >= 0:
                match = _Match(begin + len(stop) - old, self._shown_before[begin], stop)
                if best is None or (match.end, -len(stop)) < (best.end, -len(best.stop)):
                    best = match
        return best

    def _num_possible(self) -> int:
        """Length of the longest end of the text that could be the beginning of a stop string."""
        if self._text[-1] not in self._endings:
            return 0
        lengths = range(min(self._longest - 1, len(self._text)), 0, -1)
        return next((n for n in lengths if self._text[-n:] in self._beginnings), 0)


_SPECIAL_TEXTS: WeakKeyDictionary[DecodesTokens, dict[int, str]] = WeakKeyDictionary()


def _special_texts(tokenizer: DecodesTokens) -> dict[int, str]:
    """The text of each special token that has one; made once a tokenizer."""
    texts = _SPECIAL_TEXTS.get(tokenizer)
    if texts is None:
        every = {i: tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_ids}
        texts = _SPECIAL_TEXTS[tokenizer] = {i: text for i, text in every.items() if text}
    return texts


def detokenize(tokenizer: DecodesTokens, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of a whole list: what pushing one by one and ``finish`` give, without half a character at the end."""
    if tokenizer.is_byte_level:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        data = b"".join(tokenizer.token_bytes(i) or b"" for i in ids if i not in skipped)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    decoder = _OffsetDecoder(tokenizer, skip_special_tokens)
    return "".join(decoder.push(i) for i in ids)
