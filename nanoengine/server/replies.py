"""What goes back: whole bodies and stream chunks of both kinds of request, as plain dicts."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from nanoengine.engine.generation import Update
from nanoengine.model.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no -inf; the number is OpenAI's


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
    num_chars: int = 0  # of the tokens reported with logprobs so far

    def add(self, update: Update) -> None:
        self.text += update.text
        self.token_ids += update.token_ids
        if update.logprobs is not None:
            self.logprobs = (self.logprobs or []) + update.logprobs
        self.prompt_logprobs = update.prompt_logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.num_prompt_tokens, self.num_cached_tokens = update.num_prompt_tokens, update.num_cached_tokens


def usage(answers: list[Answer]) -> dict:
    prompt = sum(answer.num_prompt_tokens for answer in answers)
    new = sum(len(answer.token_ids) for answer in answers)
    cached = sum(answer.num_cached_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip


class Replies:
    """The frame around each body of one request: id, kind, time, model."""

    object = chunk_object = prefix = ""

    def __init__(self, model: str, tokenizer: Tokenizer, *, num_choices: int = 1, include_usage: bool = False,
                 num_top: int = 0, with_end: bool = False):  # fmt: skip
        self.tokenizer, self.include_usage, self.num_top = tokenizer, include_usage, num_top
        self.with_end = with_end  # an end token counts as part of the text
        self.answers = [Answer() for _ in range(num_choices)]
        self.frame = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def body(self) -> dict:
        """The whole answer."""
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        return self.frame | {"object": self.object, "choices": choices, "usage": usage(self.answers)}

    def first_chunks(self) -> list[dict]:
        return []

    def chunk(self, update: Update) -> dict | None:
        """What one update adds to the stream; None if nothing that a reader could see."""
        answer = self.answers[update.index]
        answer.add(update)
        logprobs = None if update.logprobs is None else self._logprobs(answer, _shown(update, self.with_end))
        if not update.text and not logprobs and update.finish_reason is None:
            return None
        return self._chunk([self._delta(update, logprobs)])

    def last_chunks(self) -> list[dict]:
        if not self.include_usage:
            return []
        return [self._chunk([]) | {"usage": usage(self.answers)}]

    def _chunk(self, choices: list[dict]) -> dict:
        chunk = self.frame | {"object": self.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _all_logprobs(self, answer: Answer) -> dict | None:
        return None if answer.logprobs is None else self._logprobs(answer, _shown(answer, self.with_end))

    def _token(self, token_id: int) -> str:
        """A token as text, and part of a character as its bytes, as in OpenAI's API: bytes:\\xe4."""
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        data = self.tokenizer.token_bytes(token_id) if "\ufffd" in text else None
        return text if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _prompt_logprobs(self, answer: Answer) -> dict:
        """vLLM's field, for each prompt token {id: {"logprob", "decoded_token"}}; {} if nobody asked."""
        if answer.prompt_logprobs is None:
            return {}

        def described(token: int, value: float) -> dict:
            return {"logprob": max(value, LEAST_LOGPROB), "decoded_token": self._token(token)}

        entries = [
            entry and {str(token): described(token, value) for token, value in entry.items()}
            for entry in answer.prompt_logprobs
        ]
        return {"prompt_logprobs": entries}

    def _choice(self, index: int, answer: Answer) -> dict:
        raise NotImplementedError

    def _delta(self, update: Update, logprobs: dict | None) -> dict:
        raise NotImplementedError

    def _logprobs(self, answer: Answer, shown: list[tuple[int, dict[int, float]]]) -> dict | None:
        raise NotImplementedError


class ChatReplies(Replies):
    """chat.completion and chat.completion.chunk"""

    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def body(self) -> dict:
        return super().body() | self._prompt_logprobs(self.answers[0])

    def first_chunks(self) -> list[dict]:
        return [
            self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                          "finish_reason": None}])  # fmt: skip
            for index in range(len(self.answers))
        ]

    def _choice(self, index: int, answer: Answer) -> dict:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._all_logprobs(answer),
                "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}  # fmt: skip

    def _delta(self, update: Update, logprobs: dict | None) -> dict:
        delta = {"content": update.text} if update.text else {}
        return {"index": update.index, "delta": delta, "logprobs": logprobs, "finish_reason": update.finish_reason}

    def _logprobs(self, answer: Answer, shown: list[tuple[int, dict[int, float]]]) -> dict | None:
        content = []
        for token_id, entry in shown:
            top = [self._entry(i, value) for i, value in _likeliest(entry, self.num_top)]
            content.append(self._entry(token_id, entry[token_id]) | {"top_logprobs": top})
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token_id: int, logprob: float) -> dict:
        text, data = self._token(token_id), self.tokenizer.token_bytes(token_id)
        data = text.encode() if data is None else data
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


class CompletionReplies(Replies):
    """text_completion"""

    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl"

    def _choice(self, index: int, answer: Answer) -> dict:
        choice = {"index": index, "text": answer.text, "logprobs": self._all_logprobs(answer),
                  "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}  # fmt: skip
        return choice | self._prompt_logprobs(answer)

    def _delta(self, update: Update, logprobs: dict | None) -> dict:
        return {"index": update.index, "text": update.text, "logprobs": logprobs,
                "finish_reason": update.finish_reason}  # fmt: skip

    def _logprobs(self, answer: Answer, shown: list[tuple[int, dict[int, float]]]) -> dict | None:
        tokens, offsets, own, top = [], [], [], []
        for token_id, entry in shown:
            tokens.append(self._token(token_id))
            offsets.append(answer.num_chars)
            answer.num_chars += len(self.tokenizer.decode([token_id], skip_special_tokens=False))
            own.append(max(entry[token_id], LEAST_LOGPROB))
            likeliest = _likeliest(entry, self.num_top) + [(token_id, entry[token_id])]
            top.append({self._token(i): max(value, LEAST_LOGPROB) for i, value in likeliest})
        if not tokens:
            return None
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def _likeliest(entry: dict[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(entry.items(), key=lambda item: -item[1])[:count]


def _shown(part: Update | Answer, with_end: bool) -> list[tuple[int, dict[int, float]]]:
    """Tokens with their logprobs, without the end token where that is no part of the text."""
    pairs = list(zip(part.token_ids, part.logprobs or [], strict=False))
    ended_by_token = part.finish_reason == "stop" and not isinstance(part.stop_reason, str) and not with_end
    return pairs[:-1] if ended_by_token else pairs
