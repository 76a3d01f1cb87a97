"""Several samples of one prompt, the salt of the prefix cache, and its reset, through LLM."""

from __future__ import annotations

import dataclasses
import time

import pytest

from nanoengine import LLM, CompletionOutput, SamplingParams
from nanoengine.engine.admission import make_sequence
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SEED_LIMIT

WARM = dict(temperature=1.5, max_tokens=9, ignore_eos=True)
SETTINGS = {"max_model_len": 200, "num_blocks": 60, "block_size": 4, "device": "cpu"}
LONG = list(range(10, 50))


@pytest.fixture(scope="module")
def shared():
    with LLM("tiny-llama", load_format="dummy", **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """One engine for all tests, which must leave it empty."""
    assert shared.reset_prefix_cache()
    yield shared
    manager = shared.engine.block_manager
    assert not shared.engine.has_unfinished() and manager.num_free_blocks == manager.num_blocks


# n


def test_n_samples_are_one_output_whose_flat_fields_are_the_first_sample(llm):
    params = SamplingParams(seed=3, n=4, logprobs=2, **WARM)
    first, second = llm.generate(["hello", "other"], [params, SamplingParams(**WARM)], use_tqdm=False)
    assert [type(sample) for sample in first.outputs] == [CompletionOutput] * 4
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in first.outputs}) == 4
    for sample in first.outputs:
        assert len(sample.logprobs) == len(sample.token_ids) == 9
        assert sample.finish_reason == "length" and sample.finished
        assert sample.text == llm.tokenizer.decode(sample.token_ids).rstrip("\ufffd")
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs"):
        assert first[name] == getattr(first, name) == getattr(first.outputs[0], name)
    assert (first.index, second.index) == (0, 1) and [s.index for s in second.outputs] == [0]
    assert first.finished and "outputs" in first


@pytest.mark.parametrize("seed", [0, 7, -(2**63), 2**63 - 1])
def test_sample_0_is_what_n_1_gives_and_each_sample_has_a_seed_of_its_own(llm, seed):
    one = SamplingParams(seed=seed, **WARM)
    four = dataclasses.replace(one, n=4)
    alone, together = (llm.generate("hello", params, use_tqdm=False)[0] for params in (one, four))
    assert together.outputs[0].token_ids == alone.token_ids
    again = llm.generate(["x", "hello"], dataclasses.replace(one, n=6), use_tqdm=False)[1]
    assert [s.token_ids for s in again.outputs[:4]] == [s.token_ids for s in together.outputs]
    seeds = [params.seed for params in four.samples()]
    assert seeds[0] == seed and len(set(seeds)) == 4 and all(-SEED_LIMIT <= s < SEED_LIMIT for s in seeds)
    assert [params.n for params in four.samples()] == [1] * 4
    for sample, params in zip(together.outputs, four.samples(), strict=True):
        assert llm.generate("hello", params, use_tqdm=False)[0].token_ids == sample.token_ids


def test_samples_share_their_values_and_are_not_checked_again():
    ids = range(20_000)
    params = SamplingParams(n=128, seed=1, allowed_token_ids=ids, stop_token_ids=ids,
                            bad_words_ids=[[i, i + 1] for i in ids], temperature=0.5)  # fmt: skip
    begun = time.perf_counter()
    samples = params.samples()
    assert time.perf_counter() - begun < 0.5, "the work of one sample, not of 128"
    assert all(each.allowed_token_ids is params.allowed_token_ids for each in samples)
    last = samples[-1]
    assert last == dataclasses.replace(params, n=1, seed=last.seed) and last.needs_history


def test_an_id_that_is_given_twice_counts_once():
    params = SamplingParams(allowed_token_ids=[7, 5, 7], stop_token_ids=[3, 3, 1])
    assert (params.allowed_token_ids, params.stop_token_ids) == ((7, 5), (3, 1))


def test_seeds_of_samples_are_not_those_of_neighbours_or_of_requests_without_a_seed(llm):
    seeds = [params.seed for seed in range(50) for params in SamplingParams(seed=seed, n=8).samples()]
    unseeded = [make_sequence(llm.config, 1000, i, [1], SamplingParams()).seed for i in range(400)]
    assert len(set(seeds + unseeded)) == 800


def test_without_a_seed_samples_differ_and_the_first_is_that_of_one_request():
    found = []
    for n in (1, 3):
        with LLM("tiny-llama", load_format="dummy", **SETTINGS) as llm:
            found.append(llm.generate("hello", SamplingParams(n=n, **WARM), use_tqdm=False)[0])
    one, three = found
    assert three.outputs[0].token_ids == one.token_ids
    assert len({tuple(sample.token_ids) for sample in three.outputs}) == 3


def test_greedy_samples_are_all_equal(llm):
    out = llm.generate("hello", SamplingParams(temperature=0, n=3, max_tokens=5), use_tqdm=False)[0]
    assert len({tuple(sample.token_ids) for sample in out.outputs}) == 1 and len(out.outputs) == 3


def test_samples_share_the_blocks_of_their_prompt(llm):
    out = llm.generate({"prompt_token_ids": iter(LONG)}, SamplingParams(n=4, seed=1, **WARM), use_tqdm=False)[0]
    manager = llm.engine.block_manager
    assert out.num_cached_tokens == 0 and out.prompt_token_ids == LONG
    before = manager.num_hit_tokens
    llm.reset_prefix_cache()
    llm.generate([LONG], SamplingParams(n=4, seed=1, **WARM), use_tqdm=False)
    assert manager.num_hit_tokens - before == 3 * 36  # the last block of four is computed by each


def test_samples_end_each_for_itself(llm):
    params = SamplingParams(n=5, seed=2, temperature=1.5, max_tokens=30, ignore_eos=True)
    free = llm.generate("hello", params, use_tqdm=False)[0]
    stop = free.outputs[2].token_ids[3]
    out = llm.generate("hello", dataclasses.replace(params, stop_token_ids=[stop]), use_tqdm=False)[0]
    for sample, whole in zip(out.outputs, free.outputs, strict=True):
        end = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else 30
        assert sample.token_ids == whole.token_ids[:end]
        assert sample.finish_reason == ("stop" if stop in whole.token_ids else "length")


def test_a_stream_tells_samples_apart_and_joins_to_what_generate_gives(llm):
    params = SamplingParams(n=3, seed=5, **WARM)
    whole = llm.generate(["hello", "ab"], params, use_tqdm=False)
    texts: dict[tuple[int, int], str] = {}
    ends = []
    for item in llm.stream(["hello", "ab"], params):
        [sample] = item.outputs
        assert (item.text, item.token_ids, item.finish_reason) == (sample.text, sample.token_ids, sample.finish_reason)
        place = item.index, sample.index
        texts[place] = texts.get(place, "") + item.delta
        ends += [place] * item.finished
    assert texts == {(i, k): whole[i].outputs[k].text for i in range(2) for k in range(3)}
    assert sorted(ends) == sorted(texts)


def test_a_stream_that_is_left_aborts_all_samples(llm):
    for _ in llm.stream("hello", SamplingParams(n=4, **WARM)):
        break
    chat = llm.chat("hi", SamplingParams(n=2, **WARM), use_tqdm=False)
    assert len(chat) == 1 and len(chat[0].outputs) == 2
    assert {item.outputs[0].index for item in llm.stream_chat("hi", SamplingParams(n=2, **WARM))} == {0, 1}


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, "2", None, True])
def test_n_has_limits(n):
    with pytest.raises(ValueError, match="n must"):
        SamplingParams(n=n)


def test_all_samples_are_taken_or_none(llm):
    many = SamplingParams(n=128, max_tokens=1)
    assert len(llm.generate("a", many, use_tqdm=False)[0].outputs) == 128
    with pytest.raises(ValueError, match="prompt has 300 tokens"):
        llm.generate([[1, 2], [1] * 300], many, use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_the_engine_takes_one_sample_a_request(llm):
    with pytest.raises(ValueError, match=r"n must be 1 for one sequence, got 2: .*samples\(\)"):
        llm.engine.add_request([1], SamplingParams(n=2))


# reset_prefix_cache


def test_reset_prefix_cache_forgets_all(llm):
    cached = lambda: llm.generate([LONG], SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens  # noqa: E731
    assert (cached(), cached()) == (0, 36)
    assert llm.reset_prefix_cache() is True
    assert (cached(), cached()) == (0, 36)


def test_reset_prefix_cache_changes_nothing_while_a_request_runs(llm):
    params = SamplingParams(seed=1, **WARM)
    wanted = llm.generate([LONG], params, use_tqdm=False)[0].token_ids
    stream = llm.stream([LONG], params)
    next(stream)
    assert llm.reset_prefix_cache() is False
    assert list(stream)[-1].token_ids == wanted
    assert llm.generate([LONG], params, use_tqdm=False)[0].num_cached_tokens == 36
    waiting = llm.stream([LONG], params)  # queued, and nothing of it has run
    assert llm.reset_prefix_cache() is True
    assert list(waiting)[-1].token_ids == wanted


def test_reset_prefix_cache_serves_a_block_manager_of_your_own_and_refuses_a_closed_llm():
    from nanoengine.course.plain_pool import PlainPool

    with LLM("tiny-llama", load_format="dummy", block_manager=PlainPool, **SETTINGS) as llm:
        assert llm.reset_prefix_cache()
        llm.generate("a", SamplingParams(n=2, **WARM), use_tqdm=False)
        assert llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="closed"):
        llm.reset_prefix_cache()


# cache_salt


def test_prompts_share_with_their_own_salt_only(llm):
    def cached(**salt):
        prompt = {"prompt_token_ids": LONG, **salt}
        out = llm.generate(prompt, SamplingParams(seed=1, **WARM), use_tqdm=False)[0]
        ids.add(tuple(out.token_ids))
        return out.num_cached_tokens

    ids: set = set()
    assert [cached(), cached(), cached(cache_salt=None)] == [0, 36, 36]
    for salt in ("a", "b", "ab", " ", "\x00", "盐", "\ud800", "a" * 32):
        assert [cached(cache_salt=salt), cached(cache_salt=salt), cached()] == [0, 36, 36], salt
    assert len(ids) == 1, "a salt changes who shares, not what is said"
    out = llm.generate({"prompt": "a long text of more than one block", "cache_salt": "a"}, use_tqdm=False)[0]
    assert out.prompt == "a long text of more than one block"


def test_samples_and_rows_of_one_step_keep_to_their_salt(llm):
    prompts = [{"prompt_token_ids": LONG, "cache_salt": salt} for salt in "abab"]
    out = llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert [o.num_cached_tokens for o in out] == [0, 0, 36, 36]


@pytest.mark.parametrize("salt", ["", 5, b"a", ["a"], True])
def test_a_salt_is_a_non_empty_string(llm, salt):
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string, got"):
        llm.generate([{"prompt": "a"}, {"prompt": "b", "cache_salt": salt}], use_tqdm=False)
    with pytest.raises(ValueError, match="a prompt must be a str or a list"):
        llm.generate({"cache_salt": "a"}, use_tqdm=False)


def test_an_output_made_by_hand_has_its_error_in_its_sample_too():
    out = RequestOutput(0, None, [1], [], finish_reason="error", error="why")
    assert out.outputs[0].error == "why"
