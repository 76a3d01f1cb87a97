"""What happens when a launched step lands: tokens are appended, ends are found."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nanoengine.engine.batch import Batch
from nanoengine.engine.protocols import NON_FINITE, ROW_ERRORS, BlockManagerLike, Pending
from nanoengine.engine.scheduler import Plan
from nanoengine.engine.sequence import Sequence, Status
from nanoengine.shown import counted


@dataclass(slots=True)
class InFlight:
    """A step that was launched and has not landed."""

    plan: Plan
    batch: Batch
    pending: Pending
    record: dict | None = None  # what the observer will get

    @property
    def needs_history(self) -> bool:
        """True if a row's next logits depend on the token now in flight (penalties)."""
        return any(seq.params.needs_history for seq in self.batch.seqs)


@dataclass(slots=True)
class StepOutput:
    """What one step reports: two counts with names, not one number whose sign carries a meaning.

    num_prefill_tokens: tokens of rows that computed prompt (or recomputed) tokens.
    num_decode_tokens: tokens of rows that sampled the next one and computed only the newest (or the
        newest few, where the last step had brought several).
    seqs, new_tokens: the rows, and for each the token ids it got (none for an unfinished chunk).
    finished: sequences that ended in this step.
    """

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    seqs: list[Sequence] = field(default_factory=list)
    new_tokens: list[list[int]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)


def land(step: InFlight, manager: BlockManagerLike) -> StepOutput:
    """Wait for the step and write its tokens back: append, look for an end, commit full blocks.

    Rows that were ended or aborted while the step was in flight get nothing: no token after an
    end. The last step in flight of such a row gives its blocks back. Nothing, too, where the step
    before has brought a row several tokens, and this one was laid out for one: they are known. A row
    of which no token can be drawn ends with "error" (engine.protocols.Pending), and the others go on.
    But where the NaN may be another prompt's, the row starts over first: see _may_be_anothers.
    """
    results = list(step.pending.result())
    logprobs, prompt_logprobs = step.pending.logprobs, step.pending.prompt_logprobs
    batch, block_size, now = step.batch, manager.block_size, time.monotonic()
    if len(results) != len(batch.seqs) or len(batch.sample_rows) < len(results) or not all(results):
        _check_rows(results, batch)
    output = StepOutput(seqs=batch.seqs, new_tokens=results)
    for row, (seq, tokens, written) in enumerate(zip(batch.seqs, results, batch.context_lens.tolist(), strict=True)):
        seq.num_in_flight -= 1
        if seq.finish_reason is not None:
            results[row] = []
            if not seq.num_in_flight:
                manager.free(seq)
            continue
        if seq.starts_over:
            results[row] = []
            _start_over(seq, manager)
            continue
        known = seq.token_ids
        before = size = len(known)
        if written != size and tokens:  # what follows the first ``written`` tokens is known already
            results[row] = tokens = []
        for token in tokens:
            if token < 0:
                if token == NON_FINITE and _may_be_anothers(seq, output.finished):
                    _start_over(seq, manager)
                    written = 0  # nothing to commit
                else:
                    _fail(seq, token, manager)
                    output.finished.append(seq)
                results[row] = tokens[: size - before]
                break
            known.append(token)
            size += 1
            if token in seq.end_token_ids or size >= seq.max_total_tokens or seq.detokenizer is not None:
                if _ends(seq, token):
                    output.finished.append(seq)
                    results[row] = tokens[: size - before]
                    break
        if size > before + 1 and seq.finish_reason is None:
            seq.num_tokens = size  # advance() had counted one
        if seq.first_token is None and results[row]:
            seq.first_token = now
        if logprobs is not None and seq.logprobs is not None:
            seq.logprobs.extend(logprobs[row][: len(results[row])])
        if prompt_logprobs is not None and seq.prompt_logprobs is not None:
            seq.prompt_logprobs.extend(prompt_logprobs[row])
        if written // block_size > seq.num_committed_blocks and seq.finish_reason != "error":
            manager.commit(seq, written)
    _count(batch, output)
    return output


def _may_be_anothers(seq: Sequence, finished: list[Sequence]) -> bool:
    """True if no token came of the first step that needs all the KV that ``seq`` found, or may have.

    But not if the same tokens (another of n samples) have just ended with an error without it.

    What is masked still counts as 0 * NaN: a NaN of one token reaches the KV of those before it that
    are computed with it, and these may be the beginning of an innocent prompt, too.
    """
    found = seq.num_cached_tokens > 0 or seq.num_preemptions > 0
    if not seq.shares_prefix or not found or len(seq.token_ids) != seq.num_prefill_tokens:
        return False
    return all(other.error is None or other.token_ids != seq.token_ids for other in finished)


def _start_over(seq: Sequence, manager: BlockManagerLike) -> None:
    """Let ``seq`` compute all of its own, as soon as none of its steps is in flight; it keeps its place.

    If NaN comes again, they are its own, and it ends with an error.
    """
    if not seq.starts_over:
        _uncache(seq, manager)
        seq.shares_prefix, seq.starts_over, seq.num_cached_tokens = False, True, 0
    if seq.num_in_flight:
        seq.num_tokens = seq.max_total_tokens  # nothing to schedule until that has landed
    else:
        manager.free(seq)
        seq.restart()
        seq.status = Status.RUNNING


def _ends(seq: Sequence, token: int) -> bool:
    """End ``seq`` if ``token``, just appended, ends it."""
    if token in seq.end_token_ids and seq.num_output_tokens > seq.params.min_tokens:
        matched = None
        if seq.detokenizer is not None and seq.params.include_stop_str_in_output:
            matched = seq.detokenizer.push(token)
        end(seq, "stop", token if matched is None else matched)
        return True
    matched = seq.detokenizer.push(token) if seq.detokenizer is not None else None
    if matched is not None:
        end(seq, "stop", matched)
    elif len(seq.token_ids) >= seq.max_total_tokens:
        end(seq, "length")
    return seq.finish_reason is not None


def end(seq: Sequence, finish_reason: str, stop_reason: str | int | None = None) -> None:
    """Mark ``seq`` as ended and let out the text that was held back for a stop string."""
    seq.finish_reason, seq.stop_reason, seq.finished_at = finish_reason, stop_reason, time.monotonic()
    if seq.detokenizer is not None:
        seq.detokenizer.finish()


def _fail(seq: Sequence, code: int, manager: BlockManagerLike) -> None:
    """End ``seq`` for the reason that the runner gives; nobody may find KV that may hold NaN."""
    if code not in ROW_ERRORS:
        raise RuntimeError(
            f"the runner returned token id {code} for request {seq.seq_id}: an id is at least 0; "
            f"{', '.join(map(str, ROW_ERRORS))} say why none could be drawn (engine.protocols)"
        )
    counts = f"{counted(len(seq.token_ids), 'token')}, {seq.num_prompt_tokens} of them the prompt's"
    seq.error = f"{ROW_ERRORS[code]}; it had {counts}"
    end(seq, "error")
    _uncache(seq, manager)


def _uncache(seq: Sequence, manager: BlockManagerLike) -> None:
    if hasattr(manager, "uncache"):  # one of your own without a prefix cache need not have it
        manager.uncache(seq)


def _check_rows(results: list[list[int]], batch: Batch) -> None:
    """RuntimeError if a runner (perhaps your own) brings tokens for other rows than the batch samples."""
    if len(results) != len(batch.seqs):
        raise RuntimeError(f"the runner returned {len(results)} rows for a batch of {len(batch.seqs)}")
    found, sampled = [row for row, tokens in enumerate(results) if len(tokens)], batch.sample_rows.tolist()
    if found != sampled:
        raise RuntimeError(f"the runner returned tokens for rows {found}, but rows {sampled} sample one")


def _count(batch: Batch, output: StepOutput) -> None:
    sampled = batch.query_lens[batch.sample_rows]  # a chunk of one token that samples nothing is prefill
    output.num_decode_tokens = len(sampled) if batch.is_decode else int((sampled == 1).sum())
    for row in () if batch.is_decode else batch.sample_rows[sampled > 1].tolist():
        if batch.context_lens[row] - batch.query_lens[row] >= batch.seqs[row].num_prefill_tokens:
            output.num_decode_tokens += int(batch.query_lens[row])
    output.num_prefill_tokens = len(batch.input_ids) - output.num_decode_tokens
