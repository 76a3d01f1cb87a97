"""What goes back: whole bodies and stream chunks of both kinds of request, as plain dicts."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from nanoengine.engine.generation import Update
from nanoengine.model.token_parts import TokenPart, make_parts, write_out
from nanoengine.model.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # the number is OpenAI's


def _number(logprob: float) -> float:
    """JSON has neither -inf nor NaN, and max(nan, x) is NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


@dataclass
class Answer:
    """One choice as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    parts: Any = None  # of the text, by token (model.token_parts); made with the first logprobs
    unreported: list[tuple[TokenPart, dict[int, float]]] = field(default_factory=list)  # tokens with their logprobs

    def add(self, update: Update) -> None:
        self.text += update.text
        self.token_ids += update.token_ids
        if update.logprobs is not None:
            self.logprobs = (self.logprobs or []) + update.logprobs
        self.prompt_logprobs = update.prompt_logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.num_prompt_tokens, self.num_cached_tokens = update.num_prompt_tokens, update.num_cached_tokens


def usage(answers: list[Answer], n: int = 1) -> dict:
    """A prompt counts once, and so does what was found of it in the cache: by the first of its n choices."""
    prompt = sum(answer.num_prompt_tokens for answer in answers[::n])
    new = sum(len(answer.token_ids) for answer in answers)
    cached = sum(answer.num_cached_tokens for answer in answers[::n])
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip


class Replies:
    """The frame around each body of one request: id, kind, time, model. n: choices of each prompt.

    Logprobs: an entry a token. Its bytes are the token's part of the text, so that the bytes of all entries join to
    the text's UTF-8 (bytes that make no character are given as they are); what is not in the text (a special token
    that is left out, what a stop string cuts off, half a character at the end) has none. Its offset is the character
    of the text at which it begins. In a stream an entry comes when its text has come.
    """

    object = chunk_object = prefix = ""

    def __init__(self, model: str, tokenizer: Tokenizer, *, num_choices: int = 1, n: int = 1,
                 include_usage: bool = False, num_top: int = 0, skip_special_tokens: bool = True,
                 with_end: bool = False):  # fmt: skip
        self.n = n
        self.tokenizer, self.include_usage, self.num_top = tokenizer, include_usage, num_top
        self.skip_special_tokens = skip_special_tokens
        self.with_end = with_end  # an end token counts as part of the text
        self.answers = [Answer() for _ in range(num_choices)]
        self.frame = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def body(self) -> dict:
        """The whole answer."""
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        return self.frame | {"object": self.object, "choices": choices, "usage": usage(self.answers, self.n)}

    def first_chunks(self) -> list[dict]:
        return []

    def chunk(self, update: Update) -> dict | None:
        """What one update adds to the stream; None if nothing that a reader could see."""
        answer = self.answers[update.index]
        answer.add(update)
        logprobs = self._new_logprobs(answer, update)
        if not update.text and not logprobs and update.finish_reason is None:
            return None
        return self._chunk([self._delta(update, logprobs)])

    def last_chunks(self) -> list[dict]:
        if not self.include_usage:
            return []
        return [self._chunk([]) | {"usage": usage(self.answers, self.n)}]

    def _chunk(self, choices: list[dict]) -> dict:
        chunk = self.frame | {"object": self.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _all_logprobs(self, answer: Answer) -> dict | None:
        return self._new_logprobs(answer, answer)

    def _new_logprobs(self, answer: Answer, source: Update | Answer) -> dict | None:
        """Entries of the tokens that ``source`` brings, and of those held back, as far as their text has come."""
        if source.logprobs is None and not answer.unreported:
            return None
        if answer.parts is None:
            answer.parts = make_parts(self.tokenizer, self.skip_special_tokens)
        answer.unreported += [(answer.parts.push(token_id), entry) for token_id, entry in _shown(source, self.with_end)]
        length, ready = len(answer.text), answer.unreported
        if answer.finish_reason is None:
            held = next((i for i, (part, _) in enumerate(ready) if not self._has_come(part, length)), len(ready))
            ready = ready[:held]
        elif self.with_end and isinstance(answer.stop_reason, str):
            write_out([part for part, _ in ready], answer.stop_reason, length, self.tokenizer)
        answer.unreported = answer.unreported[len(ready) :]
        return self._logprobs(ready, length)

    def _has_come(self, part: TokenPart, length: int) -> bool:
        """Has all text of the token? A special token may yet turn out to be the stop string's, which is shown."""
        may_be_shown = self.with_end and not part.chars and part.start >= length
        return part.lies_in(length) and not may_be_shown

    def _prompt_logprobs(self, answer: Answer) -> dict:
        """vLLM's field, for each prompt token {id: {"logprob", "decoded_token"}}; {} if nobody asked."""
        if answer.prompt_logprobs is None:
            return {}

        def described(token: int, value: float) -> dict:
            return {"logprob": _number(value), "decoded_token": self.tokenizer.token_text(token)}

        entries = [
            entry and {str(token): described(token, value) for token, value in entry.items()}
            for entry in answer.prompt_logprobs
        ]
        return {"prompt_logprobs": entries}

    def _choice(self, index: int, answer: Answer) -> dict:
        raise NotImplementedError

    def _delta(self, update: Update, logprobs: dict | None) -> dict:
        raise NotImplementedError

    def _logprobs(self, shown: list[tuple[TokenPart, dict[int, float]]], length: int) -> dict | None:
        """length: of the text, in characters."""
        raise NotImplementedError


class ChatReplies(Replies):
    """chat.completion and chat.completion.chunk"""

    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def body(self) -> dict:
        return super().body() | self._prompt_logprobs(self.answers[0])

    def first_chunks(self) -> list[dict]:
        return [
            self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                          "finish_reason": None, "stop_reason": None}])  # fmt: skip
            for index in range(len(self.answers))
        ]

    def _choice(self, index: int, answer: Answer) -> dict:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._all_logprobs(answer),
                "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}  # fmt: skip

    def _delta(self, update: Update, logprobs: dict | None) -> dict:
        delta = {"content": update.text} if update.text else {}
        return {"index": update.index, "delta": delta, "logprobs": logprobs,
                "finish_reason": update.finish_reason, "stop_reason": update.stop_reason}  # fmt: skip

    def _logprobs(self, shown: list[tuple[TokenPart, dict[int, float]]], length: int) -> dict | None:
        content = []
        for part, entry in shown:
            name = part.name(self.tokenizer)
            top = [self._alternative(i, value, part, name) for i, value in _likeliest(entry, self.num_top)]
            own = self._entry(name, entry[part.token_id], part.bytes_in(length))
            content.append(own | {"top_logprobs": top})
        return {"content": content, "refusal": None} if content else None

    def _alternative(self, token_id: int, logprob: float, part: TokenPart, name: str) -> dict:
        """One of the likeliest tokens, by its own text; the drawn one by the name that its entry has."""
        text = self.tokenizer.token_text(token_id)
        data = self.tokenizer.token_bytes(token_id)
        data = text.encode("utf-8", "replace") if data is None else data
        return self._entry(name if token_id == part.token_id else text, logprob, data)

    def _entry(self, name: str, logprob: float, data: bytes) -> dict:
        return {"token": name, "logprob": _number(logprob), "bytes": list(data)}


class CompletionReplies(Replies):
    """text_completion"""

    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl"

    def _choice(self, index: int, answer: Answer) -> dict:
        choice = {"index": index, "text": answer.text, "logprobs": self._all_logprobs(answer),
                  "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}  # fmt: skip
        return choice | self._prompt_logprobs(answer)

    def _delta(self, update: Update, logprobs: dict | None) -> dict:
        return {"index": update.index, "text": update.text, "logprobs": logprobs,
                "finish_reason": update.finish_reason, "stop_reason": update.stop_reason}  # fmt: skip

    def _logprobs(self, shown: list[tuple[TokenPart, dict[int, float]]], length: int) -> dict | None:
        tokens, offsets, own, top = [], [], [], []
        for part, entry in shown:
            name = part.name(self.tokenizer)
            tokens.append(name)
            offsets.append(min(part.start, length))
            own.append(_number(entry[part.token_id]))
            top.append(self._top(part.token_id, name, entry))
        if not tokens:
            return None
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}

    def _top(self, drawn: int, name: str, entry: dict[int, float]) -> dict[str, float]:
        """The likeliest tokens and the one that was drawn. They go by their texts; of several with one text the one
        that was drawn or else the likeliest has it, and the others are called token_id:7."""
        found = {name: _number(entry[drawn])}
        for token_id, value in _likeliest(entry, self.num_top):
            if token_id != drawn:
                text = self.tokenizer.token_text(token_id)
                found[f"token_id:{token_id}" if text in found else text] = _number(value)
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _likeliest(entry: dict[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(entry.items(), key=lambda item: -item[1])[:count]


def _shown(part: Update | Answer, with_end: bool) -> list[tuple[int, dict[int, float]]]:
    """Tokens with their logprobs, without the end token where that is no part of the text."""
    pairs = list(zip(part.token_ids, part.logprobs or [], strict=False))
    ended_by_token = part.finish_reason == "stop" and not isinstance(part.stop_reason, str) and not with_end
    return pairs[:-1] if ended_by_token else pairs
