"""A row of which no token can be drawn: its request ends alone, and nobody finds its KV."""

from __future__ import annotations

import pytest

from nanoengine.engine.protocols import NO_TOKEN, NON_FINITE, Pending, Runner
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner
from nanoengine.trace import record

from .helpers import VOCAB, add, assert_empty, assert_right, cached, engine, finish, sequence
from .test_block_manager import A, B, C, D, hits, manager
from .test_postprocess import FakeDetokenizer

BAD = VOCAB - 1  # a prompt that holds this token has no logits


class Poisoned(SlotRunner):
    """Brings ``code`` for a row whose prompt holds BAD.

    From the ``at``-th token of the answer on.
    """

    def __init__(self, *args, code=NON_FINITE, at=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.code, self.at = code, at

    def _run(self, batch):
        tokens = super()._run(batch)
        for row, seq in enumerate(batch.seqs):
            made = int(batch.context_lens[row]) - seq.num_prompt_tokens
            if tokens[row] and BAD in seq.token_ids[: seq.num_prompt_tokens] and made >= self.at:
                tokens[row] = [self.code]
        return tokens


def poisoned(overlap=0, num_blocks=64, hold_back=False, code=NON_FINITE, at=0, **settings):
    runner = Poisoned(num_blocks, 4, VOCAB, hold_back=hold_back, code=code, at=at)
    return engine(runner=runner, overlap=overlap, **settings)


@pytest.mark.parametrize("code", [NON_FINITE, NO_TOKEN])
@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("budget", [3, 100])
def test_the_request_ends_alone(overlap, policy, code, at, budget):
    eng = poisoned(overlap, code=code, at=at, policy=policy, max_num_batched_tokens=budget)
    before, after = add(eng, [1] * 9), add(eng, [2] * 5)
    bad = add(eng, [3, BAD] * 6)
    late = add(eng, [4] * 7)
    finish(eng)
    assert bad.finish_reason == "error" and len(bad.output_ids) == at
    assert ("non-finite logits" if code == NON_FINITE else "no token may be drawn") in bad.error
    for seq in (before, after, late):
        assert_right(eng, seq)
        assert seq.error is None
    assert_empty(eng)
    again = add(eng, [5, 6])
    finish(eng)
    assert_right(eng, again)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("budget", [4, 5, 100])
def test_nothing_of_it_is_found_again_not_even_chunks_of_earlier_steps(overlap, budget):
    """Its KV may hold NaN from the first chunk on, also in blocks before the token that is to blame."""
    eng = poisoned(overlap, max_num_batched_tokens=budget)
    prompt, manager = [7] * 9 + [BAD] + [8] * 10, eng.block_manager
    for tokens in (prompt, prompt, prompt[:9] + [1, 2, 3]):
        seq = add(eng, tokens)
        finish(eng)
        assert seq.num_cached_tokens == 0, "a poisoned block was found"
        assert seq.finish_reason == ("error" if BAD in tokens else "length")
        assert any(map(manager.is_cached, range(manager.num_blocks))) == (BAD not in tokens)


def test_what_others_computed_of_other_prompts_stays_cached():
    eng = poisoned()
    for tokens in ([1] * 9, [BAD] * 9, [1] * 9):
        seq = add(eng, tokens)
        finish(eng)
    assert seq.num_cached_tokens == 8


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_request_that_found_poisoned_blocks_ends_with_an_error_of_its_own(overlap):
    eng = poisoned(overlap, max_num_batched_tokens=8)
    first = add(eng, [BAD] * 8 + [1] * 30)
    eng.step()
    if overlap:
        eng.step()
    second, mate = add(eng, [BAD] * 8 + [2] * 30), add(eng, [3] * 5)
    finish(eng)
    assert [first.finish_reason, second.finish_reason] == ["error", "error"]
    assert_right(eng, mate)
    assert_empty(eng)
    assert hits_of(eng, [BAD] * 8 + [2]) == 0


def hits_of(eng, tokens) -> int:
    return hits(eng.block_manager, tokens)


@pytest.mark.parametrize("hold_back", [False, True])
def test_the_step_behind_it_is_thrown_away(hold_back):
    """With one step in flight the row runs once more, fed with no token: nothing of it counts."""
    eng = poisoned(1, hold_back=hold_back, at=2)
    bad, mate = add(eng, [BAD, 1]), add(eng, [2, 3])
    outputs = finish(eng)
    ran = [out for out in outputs if bad in out.seqs]
    assert [out.new_tokens[out.seqs.index(bad)] != [] for out in ran] == [True, True, False, False]
    assert len(bad.output_ids) == 2
    assert [out.finished for out in ran][2] == [bad]
    assert_right(eng, mate)


def test_text_logprobs_and_times_are_those_of_the_tokens_before():
    class WithLogprobs(Poisoned):
        def launch(self, batch):
            pending = super().launch(batch)
            pending.logprobs = [[{1: float("nan")}] for _ in batch.seqs]
            return pending

    eng = engine(runner=WithLogprobs(20, 4, VOCAB, at=2))
    text = FakeDetokenizer(99)
    params = SamplingParams(max_tokens=9, logprobs=1)
    seq = eng.add_request([BAD], params, detokenizer=text)
    at_once = poisoned()
    none = add(at_once, [BAD])
    finish(eng)
    finish(at_once)
    assert text.pushed == seq.output_ids and len(seq.logprobs) == 2 and text.finished == 1
    assert seq.first_token is not None and none.first_token is None
    assert none.finished_at is not None


class Drafts(Runner, Pending):
    """Several tokens of a row, the third of which cannot be drawn."""

    num_blocks, block_size = 8, 4

    def __init__(self, tokens):
        self.tokens = tokens

    def launch(self, batch):
        return self

    def result(self):
        return [list(self.tokens)]

    def close(self):
        pass


def test_of_several_tokens_those_before_the_error_count():
    eng = engine(runner=Drafts([5, 9, NON_FINITE, 7]))
    seq = add(eng, [1])
    out = eng.step()
    assert (seq.output_ids, seq.finish_reason, out.new_tokens) == ([5, 9], "error", [[5, 9]])


@pytest.mark.parametrize("code", [-3, -(2**31)])
def test_any_other_negative_id_is_a_mistake_of_the_runner(code):
    eng = engine(runner=Drafts([code]))
    seq = add(eng, [1])
    with pytest.raises(RuntimeError, match=f"returned token id {code} for request 0.* -1, -2 say why"):
        eng.step()
    eng.abort(seq)
    assert_empty(eng)


def test_a_block_manager_without_a_prefix_cache_needs_no_uncache():
    from .test_replaceable import ListOfBlocks

    eng = engine(runner=Poisoned(8, 4, VOCAB), block_manager=ListOfBlocks(8, 4))
    bad, mate = add(eng, [BAD]), add(eng, [1])
    for _ in eng.run():
        pass
    assert bad.finish_reason == "error"
    assert_right(eng, mate)


def test_a_trace_tells_the_reason():
    eng = poisoned()
    add(eng, [BAD, 1])
    with record(eng) as trace:
        finish(eng)
    [event] = [event for step in trace for event in step["events"] if event["kind"] == "finish"]
    assert event["reason"] == "error" and "non-finite logits" in event["why"]


# BlockManager.uncache


def test_uncache_takes_the_whole_path_and_all_that_hangs_on_it():
    m = manager(20)
    one, two = cached(m, A + B + [9]), cached(m, A + B + C + [9], seq_id=1)
    other = cached(m, D + D + [9], seq_id=2)
    three = cached(m, A + D + [9], seq_id=3)
    m.uncache(one)
    assert [hits(m, t + [9]) for t in (A, A + B, A + B + C, A + D, D + D)] == [0, 0, 0, 0, 2]
    m.check_invariants([one, two, three, other])
    fresh = cached(m, A + B + [9], seq_id=4)
    assert fresh.num_cached_tokens == 0 and hits(m, A + B + [9]) == 2


def test_uncache_leaves_what_is_only_like_it():
    m = manager(20)
    one, other = cached(m, A + B + [9]), cached(m, B + B + [9], seq_id=1)
    m.uncache(one)
    assert hits(m, B + B + [9]) == 2
    m.uncache(one)  # twice is once
    m.check_invariants([one, other])


def test_what_a_mate_commits_later_on_an_uncached_prefix_is_not_found_and_pushes_nothing_out():
    m = manager(20)
    bad = cached(m, A + B + [9])
    mate = sequence(A + B + C + D + [9], 1)
    m.allocate(mate, m.lookup(mate))
    m.uncache(bad)
    good = cached(m, A + B + C + D + [9], seq_id=2)
    mate.num_computed_tokens = 9
    m.commit(mate, 9)
    assert m.lookup(sequence(A + B + C + D + [9])) == good.block_table[:4]
    m.check_invariants([bad, mate, good])


def test_the_error_counts_one_token_as_one():
    eng = poisoned()
    one, two = add(eng, [BAD]), add(eng, [3, BAD])
    finish(eng)
    assert one.error.endswith("; it had 1 token, 1 of them the prompt's")
    assert two.error.endswith("; it had 2 tokens, 2 of them the prompt's")
