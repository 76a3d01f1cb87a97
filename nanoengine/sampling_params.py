"""What a request asks of the sampler and of the stop rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from nanoengine.checks import BIG, boolean, integer, integers, number

SEED_LIMIT = 2**63
MAX_N = 128  # as in OpenAI's API
MOST_LOGPROBS = 1000  # of logprobs and prompt_logprobs


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How to choose the next token, and when to stop. The defaults are these whatever the model: the sampling values
    of a model's generation_config.json are not used (loading says which they are).

    temperature: 0 is greedy (top_k, top_p and min_p then change nothing); must be >= 0.
    top_k: keep the k most likely tokens; 0 or -1 keeps all. top_p: keep the smallest set whose
        probabilities sum to at least top_p. min_p: drop tokens less likely than min_p times the
        likeliest.
    logit_bias: {token id: number in [-100, 100]}, added to the logits of these tokens.
    allowed_token_ids: only these tokens can be sampled; an end token only if it is among them.
    bad_words: texts that the output must not hold, each as it stands at the start of a text and,
        where that is as many tokens, after a blank. A word is a sequence of tokens: its last
        token is impossible where the others are the last ones of the output. The prompt does not
        count, and the same text cut into other tokens is not found.
    bad_words_ids: these sequences. LLM and the server fill it in from bad_words, because they have
        a tokenizer; what is given is taken as it is.
    repetition_penalty: > 1 divides positive and multiplies negative logits of every token seen in
        prompt or output (Keskar et al. 2019, arXiv:1909.05858).
    presence_penalty, frequency_penalty: subtracted once, or once per occurrence, from the logits
        of tokens already generated; each in [-2, 2], as in OpenAI's API.
    n: samples of one prompt, 1 to 128; they share its blocks. Sample 0 is what n=1 gives for the same
        seed; the seed of sample i is a hash of (seed, i). With temperature 0 all are equal.
    seed: makes the random numbers of this request depend on seed and position alone, so that
        batch mates, chunking and preemption do not change it (given equal logits).
    max_tokens: upper bound of generated tokens; None means up to the model's limit.
    min_tokens: end tokens and stop_token_ids are impossible until this many are generated, and
        stop strings are not looked for.
    stop: text that ends the output and is not part of it; may span tokens. One that holds the
        text of a special token (as "<|im_end|>") matches that token, too, where it is left out of
        the text. An end token ends the output by itself: it counts before any stop string.
    stop_token_ids: further end tokens. ignore_eos: the model's own end tokens do not stop.
    include_stop_str_in_output: the stop string that ended the output is the end of its text, and
        so is the text of an end token, unless it is special and skip_special_tokens is True.
    logprobs: number of most likely tokens to report at each position (natural log of the model's
        own distribution, before anything above); None reports nothing.
    prompt_logprobs: the same for each token of the prompt, itself included; None for the first.
        The whole prompt is computed then: nothing of it is read from the prefix cache.
    skip_special_tokens: leave special tokens out of the text (stop tokens always are).
    detokenize: False leaves ``text`` empty and saves the work.

    Order: logit_bias is added; then come repetition, frequency and presence penalties; then what
    is not in allowed_token_ids, what would complete a bad word and (before min_tokens) the end
    tokens get -inf, which nothing can undo; then temperature, top_k, top_p, min_p. The order and
    the result are vLLM's, but for min_p: vLLM applies it before top_k and top_p, transformers
    after them, as here.

    Errors: ValueError that names the argument, its value and the limit; TypeError for unknown
    keywords (by Python itself).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | SequenceOf[str] | None = None
    stop_token_ids: SequenceOf[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = 1
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: SequenceOf[int] | None = None
    bad_words: SequenceOf[str] = ()
    bad_words_ids: SequenceOf[SequenceOf[int]] = ()
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    # True if the next token's logits depend on what the last one was (penalties, bad words of
    # several tokens); asked for each row of each step
    needs_history: bool = field(init=False, repr=False, compare=False, default=False)
    has_penalties: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 (frozen)
        put("n", integer("n", self.n, 1, MAX_N))
        put("temperature", number("temperature", self.temperature, 0.0, 1e4))
        put("top_k", max(0, integer("top_k", self.top_k, -1, BIG)))
        put("top_p", number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put("min_p", number("min_p", self.min_p, 0.0, 1.0))
        put("repetition_penalty", number("repetition_penalty", self.repetition_penalty, 0.0, 1e4, open_low=True))
        put("presence_penalty", number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        put("has_penalties", penalties != (1.0, 0.0, 0.0))
        self._check_logits_options(put)
        put("needs_history", self.has_penalties or any(len(word) > 1 for word in self.bad_words_ids))
        if self.seed is not None:
            put("seed", integer("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1))
        if self.max_tokens is not None:
            put("max_tokens", integer("max_tokens", self.max_tokens, 1))
        put("min_tokens", integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, integer(name, getattr(self, name), 0, MOST_LOGPROBS))
        put("stop", self._stop_strings())
        put("stop_token_ids", self._stop_ids())
        for name in ("ignore_eos", "skip_special_tokens", "detokenize", "include_stop_str_in_output"):
            boolean(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs the text: detokenize must be True")

    def samples(self) -> list[SamplingParams]:
        """What each of the n samples asks: the same with n=1, and a seed of its own if there is one."""
        if self.n == 1:
            return [self]
        return [self._sample(i) for i in range(self.n)]

    def _sample(self, index: int) -> SamplingParams:
        """A copy that shares all values: they are checked, and lists may hold a million ids."""
        sample = copy(self)
        object.__setattr__(sample, "n", 1)
        object.__setattr__(sample, "seed", self._seed_of(index))
        return sample

    def _seed_of(self, sample: int) -> int | None:
        if self.seed is None or sample == 0:
            return self.seed
        both = self.seed.to_bytes(8, "little", signed=True) + sample.to_bytes(8, "little")
        return int.from_bytes(blake2b(both, digest_size=8).digest(), "little") % SEED_LIMIT

    def _check_logits_options(self, put) -> None:
        """Check and copy logit_bias, allowed_token_ids and bad_words; admission knows the vocabulary."""
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(
                    f"logit_bias must be a dict {{token id: number}}, got {self.logit_bias!r}"
                )
            checked = {}
            for token, bias in self.logit_bias.items():
                token = integer("logit_bias key", token, 0, BIG)
                checked[token] = number(f"logit_bias[{token}]", bias, -100.0, 100.0)
            put("logit_bias", checked or None)
        if self.allowed_token_ids is not None:
            ids = integers("allowed_token_ids", self.allowed_token_ids, 0, BIG)
            put("allowed_token_ids", tuple(dict.fromkeys(ids)))
            if not self.allowed_token_ids:
                raise ValueError(
                    "allowed_token_ids must hold at least one token id, got []; None allows all"
                )
        words = () if self.bad_words is None else self.bad_words
        are_words = isinstance(words, (list, tuple))
        if not are_words or not all(isinstance(w, str) and w.strip() for w in words):
            raise ValueError(
                f"bad_words must be a list of strings that are not blank, got {self.bad_words!r}"
            )
        put("bad_words", tuple(dict.fromkeys(words)))
        ids = () if self.bad_words_ids is None else self.bad_words_ids
        if not isinstance(ids, (list, tuple)):
            raise ValueError(f"bad_words_ids must be a list of lists of token ids, got {ids!r}")
        ids = tuple(integers("bad_words_ids", word, 0, BIG) for word in ids)
        if not all(ids):
            raise ValueError(
                f"bad_words_ids must hold lists of at least one token id, got {self.bad_words_ids!r}"
            )
        put("bad_words_ids", ids)

    def _stop_strings(self) -> tuple[str, ...]:
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be a non-empty string or a list of them, got {self.stop!r}")
        return tuple(stop)

    def _stop_ids(self) -> tuple[int, ...]:
        ids = self.stop_token_ids if self.stop_token_ids is not None else ()
        return tuple(dict.fromkeys(integers("stop_token_ids", ids, 0, BIG)))


def with_bad_words_ids(params: SamplingParams, encode: Callable[..., list[int]]) -> SamplingParams:
    """``params``, its bad_words as tokens. encode: Tokenizer.encode.

    Each word is encoded without and with a blank before it. The second form counts where it is
    another first token and as many tokens; else it is the first form after a token for a blank.
    Source: vLLM's SamplingParams, which follows transformers' NoBadWordsLogitsProcessor.
    Errors: ValueError for a word that is no token.
    """
    if not isinstance(params, SamplingParams) or not params.bad_words or params.bad_words_ids:
        return params
    ids: list[list[int]] = []
    for word in params.bad_words:
        word = word.lstrip()
        alone = encode(word, add_special_tokens=False)
        after_blank = encode(" " + word, add_special_tokens=False)
        if not alone:
            raise ValueError(f"bad_words holds {word!r}, which the tokenizer turns into no token")
        ids.append(alone)
        if len(after_blank) == len(alone) and after_blank[0] != alone[0]:
            ids.append(after_blank)
    return replace(params, bad_words_ids=ids)
