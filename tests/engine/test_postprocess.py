"""What a landed step writes: tokens, ends, counts, log-probabilities, times; text through a detokeniser."""

from __future__ import annotations

import pytest

from nanoengine.engine.protocols import Runner
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import Done, SlotRunner

from .helpers import add, assert_right, done, engine, finish, recorded


@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("budget", [1, 5, 100])
def test_the_two_counts_are_all_computed_tokens(policy, overlap, budget):
    eng = recorded(60, 4, policy=policy, overlap=overlap, max_num_batched_tokens=budget, enable_prefix_caching=False)
    seqs = [add(eng, [k] * (2 + 5 * k), max_tokens=7) for k in range(3)]
    outputs = finish(eng)
    rows = [row for step in eng.runner.steps for row in step]
    decodes = sum(n == 1 and sampled for _, n, sampled in rows)  # a last chunk of one token is one of them
    assert sum(out.num_decode_tokens for out in outputs) == decodes >= 3 * 6
    assert sum(out.num_prefill_tokens for out in outputs) == 2 + 7 + 12 + 3 * 6 - decodes
    assert sum(len(out.finished) for out in outputs) == 3
    done(eng, seqs)


class WithLogprobs(SlotRunner):
    def launch(self, batch):
        pending = super().launch(batch)
        pending.logprobs = [[{token: -0.5}] if (token := len(s.token_ids)) else [] for s in batch.seqs]
        return pending


def test_logprobs_keep_step_with_the_tokens_of_those_who_asked():
    eng = engine(runner=WithLogprobs(20, 4, 50), overlap=1)
    asked, silent = add(eng, [1, 2, 3], logprobs=2, max_tokens=5), add(eng, [4], max_tokens=8)
    finish(eng)
    assert len(asked.logprobs) == len(asked.output_ids) == 5 and silent.logprobs is None


class FakeDetokenizer:
    """Finds its stop string at the n-th token."""

    def __init__(self, n: int):
        self.n, self.pushed, self.finished = n, [], 0

    def push(self, token):
        self.pushed.append(token)
        return "STOP" if len(self.pushed) == self.n else None

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("overlap", [0, 1])
def test_each_token_goes_through_the_detokenizer_once_and_every_end_lets_its_text_out(overlap):
    eng = engine(overlap=overlap, vocab_size=1000)
    stopped, limited, aborted = (FakeDetokenizer(n) for n in (4, 99, 99))
    seqs = [eng.add_request([1, 2], SamplingParams(max_tokens=9), detokenizer=d) for d in (stopped, limited, aborted)]
    eng.step()
    eng.step()
    eng.abort(seqs[2])
    finish(eng)
    assert [(seq.finish_reason, seq.stop_reason) for seq in seqs] == [
        ("stop", "STOP"),
        ("length", None),
        ("abort", None),
    ]
    for seq, fake in zip(seqs, (stopped, limited, aborted), strict=True):
        assert fake.pushed == seq.output_ids and fake.finished == 1
    assert_right(eng, seqs[1])


def test_a_detokenizer_that_raises_loses_no_other_request():
    class Bad(FakeDetokenizer):
        def push(self, token):
            raise UnicodeError("half a character")

    eng = engine()
    ends = add(eng, [5], max_tokens=1)  # ends in the step that fails
    other = add(eng, [1, 2])
    bad = eng.add_request([3], detokenizer=Bad(1))
    with pytest.raises(UnicodeError):
        eng.step()
    assert ends.is_finished and ends.finish_reason == "length" and ends not in eng.sequences.values()
    eng.abort(bad)
    done(eng, [other])


class TwoTokens(Runner):
    """Brings several tokens for a row, as accepted drafts would."""

    num_blocks, block_size = 8, 4

    def launch(self, batch):
        return Done([[5, 9, 7] for _ in batch.seqs])

    def close(self):
        pass


def test_of_several_tokens_none_comes_after_an_end():
    eng = engine(runner=TwoTokens())
    ended, limited = add(eng, [1], stop_token_ids=[9]), add(eng, [2], max_tokens=1)
    out = eng.step()
    assert (ended.output_ids, ended.stop_reason) == ([5, 9], 9)
    assert (limited.output_ids, limited.finish_reason) == ([5], "length")
    assert out.new_tokens == [[5, 9], [5]] and out.finished == [ended, limited]


def test_rows_that_need_the_last_token_are_never_launched_before_it_is_known():
    seen = []

    class Watching(SlotRunner):
        def launch(self, batch):
            seen.append(batch.token_rows is not None)
            return super().launch(batch)

    eng = engine(runner=Watching(20, 4, 50), overlap=1)
    seqs = [add(eng, [1, 2], repetition_penalty=1.2), add(eng, [1, 2])]
    done(eng, seqs)
    assert not any(seen)
    done(eng, [add(eng, [3, 4])])
    assert any(seen), "without penalties the step after is launched at once"


def test_times_are_in_order():
    eng = engine()
    seq = add(eng, [1, 2])
    eng.step()
    first = seq.first_token
    finish(eng)
    assert seq.arrival <= first == seq.first_token < seq.finished_at
