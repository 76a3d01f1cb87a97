"""The parts of an engine that can be replaced, as typing.Protocols.

``LLMEngine(config, runner, scheduler=, block_manager=, observer=)`` takes any object with these
attributes and methods, or, for scheduler and block manager, its class (the sizes of the pool are the
runner's to say). Subclass the protocol to inherit its defaults. That is how a learner's own part
runs the real model, and how an exercise is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from nanoengine.engine.batch import Batch
from nanoengine.engine.sequence import Sequence

# What Pending.result() may hold in place of a token id, and what the request is told.
NON_FINITE, NO_TOKEN = -1, -2
ROW_ERRORS = {
    NON_FINITE: "non-finite logits: the model computed NaN or +inf for the next token (a weight "
    "that is not finite, or an overflow of float16; try dtype='bfloat16' or 'float32')",
    NO_TOKEN: "no token may be drawn: the logits of all tokens are -inf (every one is banned, by "
    "stop_token_ids and min_tokens say, or the model itself rules all out)",
}


def members(protocol: type) -> list[str]:
    """Attributes and methods that a part must have to fit ``protocol``."""
    names = {*protocol.__annotations__, *vars(protocol)}
    return sorted(name for name in names if not name.startswith("_"))


def require(part: Any, protocol: type, name: str) -> None:
    """TypeError that names what ``part`` lacks of ``protocol``."""
    missing = [member for member in members(protocol) if not hasattr(part, member)]
    if missing:
        raise TypeError(
            f"{name} {type(part).__name__} has no {', '.join(missing)}: subclass "
            f"{protocol.__module__}.{protocol.__qualname__}, which has the defaults"
        )


@runtime_checkable
class DeclaresSupport(Protocol):
    """A part that names the admission.RUNNER_OPTIONS that it has."""

    supports: frozenset[str]


def supported_by(part: Any) -> frozenset[str]:
    """What ``part`` declares; a plain function as sampler declares nothing."""
    return frozenset(part.supports) if isinstance(part, DeclaresSupport) else frozenset()


@runtime_checkable
class Pending(Protocol):
    """A launched step. ``result()`` waits for it; it may be asked once.

    Returns one list of token ids a row: empty for an unfinished chunk, one id for a decode or a
    finished prompt, several where drafts were accepted. logprobs: after result(), None or one list
    a row of {token id: natural-log probability} in step with the ids; prompt_logprobs the same for
    the prompt tokens of Batch.prompt. graph_bucket: the CUDA graph that ran, None for none.

    Where no token can be drawn, NON_FINITE or NO_TOKEN stands in place of the id. The engine ends
    that request alone: finish_reason "error", ``error`` says why (ROW_ERRORS), none of its blocks
    stays in the prefix cache. A request that had found KV of others first gets a second try without
    them (NON_FINITE only): the NaN may be another prompt's. The step behind it may be launched
    already and be fed with this row: the runner then feeds any valid id (what comes of it is thrown
    away), never the negative one.
    Any other negative id is a mistake of the runner: RuntimeError.

    Several ids: the pool then holds the KV of what the batch computed (its input_ids), and of none
    of the returned ids, just as with one id. The engine schedules all of them for the row's next
    step, whose query_len is their number, and so a runner need not write KV for drafts; if it does,
    elsewhere than in the row's slots. An end (stop token, stop string, length) among the ids drops
    those after it. A step that is in flight meanwhile (overlap=1) was laid out for one new id: it
    computes the first one (Batch.token_rows), and what it samples for that row is dropped, since it
    is known already. All this is right, but such a runner gains more with ``overlap = 0``.
    """

    logprobs: list[list[dict[int, float]]] | None = None
    prompt_logprobs: list[list[dict[int, float]]] | None = None
    graph_bucket: int | None = None

    def result(self) -> list[list[int]]: ...


@runtime_checkable
class Runner(Protocol):
    """Runs batches. Launches run in the order they were made.

    In each layer all KV of a step is stored before any row attends: a row may share blocks that
    another row of the same batch, before it or behind it, computes.

    num_blocks, block_size: its KV pool. overlap: steps that it likes to have in flight, 0 or 1, and
    max_mixed_prefill_tokens: the cap that it likes; both count where EngineConfig says None.
    supports: those of admission.RUNNER_OPTIONS that it has; requests with others are refused.
    failure: why no step can be done any more (a rank is lost), None while all is well.
    """

    num_blocks: int
    block_size: int
    overlap: int = 0
    max_mixed_prefill_tokens: int | None = None
    supports: frozenset[str] = frozenset()
    failure: str | None = None

    def launch(self, batch: Batch) -> Pending: ...

    def close(self) -> None: ...


@runtime_checkable
class SchedulerLike(Protocol):
    """See engine.scheduler.Scheduler: subclass it and write ``schedule``, or bring all of this."""

    block_manager: BlockManagerLike
    waiting: Any
    running: list[Sequence]

    def add(self, seq: Sequence) -> None: ...
    def schedule(self) -> Any: ...
    def must_land_first(self) -> bool: ...
    def advance(self, plan: Any) -> None: ...
    def retire(self, finished: list[Sequence]) -> None: ...
    def restart(self, unfinished: Iterable[Sequence]) -> None: ...


@runtime_checkable
class BlockManagerLike(Protocol):
    """See engine.block_manager.BlockManager. One that caches prefixes has ``uncache(seq)``, too.

    One that shares blocks must not do so between sequences of different ``cache_salt``.
    """

    num_blocks: int
    block_size: int
    num_free_blocks: int

    def lookup(self, seq: Sequence) -> list[int]: ...
    def can_allocate(self, seq: Sequence, cached: list[int], reserve: int = 0) -> bool: ...
    def allocate(self, seq: Sequence, cached: list[int]) -> None: ...
    def grow(self, seq: Sequence, num_tokens: int) -> bool: ...
    def commit(self, seq: Sequence, num_written: int) -> None: ...
    def free(self, seq: Sequence) -> None: ...
    def reset(self) -> None: ...


@runtime_checkable
class Observer(Protocol):
    """Sees each step: ``before`` it is launched, and ``after`` it landed. See trace.Trace."""

    def before(self, engine: Any, plan: Any, batch: Batch) -> dict | None: ...
    def after(self, engine: Any, step: Any, output: Any) -> None: ...


class Sampler(Protocol):
    """See worker.sampler.Sampler: logits [S, vocabulary] and the rows' sequences in, ids [S] out.

    It may return NO_TOKEN for a row that has no token left. Rows of which the model's logits hold
    NaN or +inf end with NON_FINITE, whatever it returns for them; any other id outside the
    vocabulary is a RuntimeError that names it.
    It may name in ``supports`` those of logit_bias, allowed_token_ids and bad_words that it has.
    """

    def __call__(self, logits: Any, seqs: list[Sequence], positions: Any) -> Any: ...


class Detokenizer(Protocol):
    """Text of one request, token by token. See tokenizer.detokenizer.IncrementalDetokenizer."""

    text: str

    def push(self, token_id: int) -> str | None:
        """Take one token; returns the stop string that it completed, if any."""
        ...

    def finish(self) -> None:
        """Let out the text that was held back."""
        ...
