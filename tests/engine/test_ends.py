"""When an answer ends: end tokens, stop ids, min_tokens, limits (engine_cases 6, 24)."""

from __future__ import annotations

import pytest

from nanoengine.sampling_params import SamplingParams

from .helpers import assert_right, engine, finish


def ending_at(position: int, prompt=(1, 2, 3)):
    """The token that SlotRunner generates at ``position`` for the first time."""
    eng = engine(vocab_size=1000)
    seq = eng.add_request(prompt)
    finish(eng)
    assert seq.output_ids.index(seq.output_ids[position]) == position
    return seq.output_ids[position], seq.output_ids


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("min_tokens", [0, 1, 4, 5, 6])
def test_an_end_token_counts_only_after_min_tokens(min_tokens, overlap):
    token, output = ending_at(4)  # the fifth
    for kwargs, eos in (({"stop_token_ids": [token]}, ()), ({}, (token,))):
        eng = engine(vocab_size=1000, eos_token_ids=eos, overlap=overlap)
        seq = eng.add_request([1, 2, 3], SamplingParams(min_tokens=min_tokens, **kwargs))
        finish(eng)
        assert_right(eng, seq)
        assert (seq.num_output_tokens == 5) == (min_tokens < 5)
        if min_tokens < 5:
            assert (seq.finish_reason, seq.stop_reason) == ("stop", token)


def test_ignore_eos_ignores_the_models_ends_but_not_the_requests():
    token, output = ending_at(4)
    other = output[7]
    assert output.index(other) == 7
    eng = engine(vocab_size=1000, eos_token_ids=(token,))
    seqs = [eng.add_request([1, 2, 3], SamplingParams(ignore_eos=True, stop_token_ids=ids)) for ids in ((), (other,))]
    finish(eng)
    assert [seq.num_output_tokens for seq in seqs] == [64, 8]


def test_an_end_token_at_the_very_last_place_is_a_stop():
    token, _ = ending_at(4)
    eng = engine(vocab_size=1000, eos_token_ids=(token,))
    seq = eng.add_request([1, 2, 3], SamplingParams(max_tokens=5))
    finish(eng)
    assert (seq.finish_reason, seq.num_output_tokens) == ("stop", 5)
