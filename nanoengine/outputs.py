"""What the engine gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request. index: which of its n; the other fields as in RequestOutput."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One finished (or, while streaming, growing) request.

    ``out["text"]`` and ``out["token_ids"]`` read like nano-vllm's dicts; ``out.outputs[0].text``
    reads like vLLM's objects; plain attributes are the shortest.

    token_ids: generated ids, the end token included. text: their text without a character cut in
    half, and without end token or stop string (but see include_stop_str_in_output). finish_reason:
    "stop", "length", "abort" or "error"; None while running. stop_reason: the stop string or token
    id that ended it, if one did.
    error: with "error", why: the model's logits were NaN or +inf, or no token was left to draw. What
    was generated before that is there; other requests are not touched, and nothing is raised.
    logprobs: one dict {token id: natural-log probability} a generated token, or None.
    prompt_logprobs: the same for each prompt token, None for the first; None if nobody asked. While
    the prompt is being computed the list is shorter.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache at first admission.
    metrics: seconds on the monotonic clock: "arrival", "first_token", "finished"; and the count
    "preemptions".
    index: which of the prompts of this call. delta: in a stream, the text new since the last item.
    outputs: one CompletionOutput a sample (SamplingParams.n), in the order of their index; an item of
    a stream has one, the sample that it is about. The fields above are those of ``outputs[0]``.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    num_cached_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    index: int = 0
    delta: str = ""
    outputs: list[CompletionOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.outputs:
            self.outputs = [CompletionOutput(0, self.text, self.token_ids, self.finish_reason, self.stop_reason,
                                             self.logprobs, self.error)]  # fmt: skip

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self):
        """The names, as a dict has it: ``"text" in out``."""
        return iter(self.keys())

    def keys(self):
        return self.__dataclass_fields__.keys()

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)
