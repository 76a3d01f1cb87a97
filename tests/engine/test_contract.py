"""What can never be served is refused when it is added, by name, value and limit; the engine goes on."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest

from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner

from .helpers import VOCAB, assert_empty, assert_right, engine, finish

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = ["1", None, [], NAN, INF, -INF, True, np.True_, 1j, np.array([1.0, 2.0]), np.array([1, 2])]
NO_INTEGERS = ["1", [], 1.5, 1.0, NAN, INF, True, np.True_, np.float64(1), np.array([1, 2]), np.array([[1]])]

BAD_PARAMS = {
    "temperature": [*NO_NUMBERS, -0.1, 1e5, 10**400],
    "top_k": [*NO_INTEGERS, None, -2, 2**31],
    "top_p": [*NO_NUMBERS, 0, -0.5, 1.0001, 10**400],
    "min_p": [*NO_NUMBERS, -0.1, 1.1],
    "repetition_penalty": [*NO_NUMBERS, 0, -1, 1e5],
    "presence_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "seed": [*NO_INTEGERS, 2**63, -(2**63) - 1],
    "max_tokens": [*NO_INTEGERS, 0, -1],
    "min_tokens": [*NO_INTEGERS, None, -1, 65],  # 65: more than max_tokens, which is 64
    "stop": ["", [""], [1], 5, {"a": 1}, [None], b"x"],
    "stop_token_ids": [5, "12", b"12", [-1], [2**31], [1.5], [True], [None], [[1]], np.array([[1]]), np.array(3)],
    "ignore_eos": [1, 0, None, "yes"],
    "logprobs": [*NO_INTEGERS, -1, 1001],
    "skip_special_tokens": [1, None],
    "detokenize": ["no", 0],
    "n": [*NO_INTEGERS, None, 0, -1, 129],
    "logit_bias": [5, [1, 2], {"5": 1.0}, {-1: 1.0}, {2**31: 1.0}, {1: 100.5}, {1: -101}, {1: NAN}, {1: "2"},
                   {1.5: 1.0}, {True: 1.0}, {1: None}],
    "allowed_token_ids": [[], 5, "12", [-1], [2**31], [1.5], [True], [None], [[1]]],
    "bad_words": ["", "word", [""], [" "], [5], 5, [None], {"a": 1}],
    "bad_words_ids": [5, [5], [[]], [[1], []], [[-1]], [[2**31]], ["a"]],
    "prompt_logprobs": [*NO_INTEGERS, -1, 1001],
    "include_stop_str_in_output": [1, None, "yes"],
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r:.25}") for name in table for value in table[name]]


@pytest.mark.parametrize(("name", "value"), cases(BAD_PARAMS))
def test_bad_sampling_value(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value)
    shown = value
    while name in ("stop_token_ids", "allowed_token_ids", "bad_words_ids", "logit_bias") and shown:
        if not isinstance(shown, (list, dict)) or repr(shown)[:60] in str(error.value):
            break  # of many values the bad one is shown
        inner = [*shown.items()][0] if isinstance(shown, dict) else shown
        shown = next(x for x in inner if repr(x) in str(error.value) or isinstance(x, list))
    assert repr(shown)[:60] in str(error.value) or isinstance(value, np.ndarray)


def test_every_sampling_field_is_in_the_table():
    assert set(BAD_PARAMS) == {field.name for field in fields(SamplingParams) if field.init}


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [("temperature", -1, "[0.0, 10000.0]"), ("top_p", 0, "(0.0, 1.0]"), ("top_p", 2, "(0.0, 1.0]"),
     ("max_tokens", 0, "at least 1"), ("min_tokens", 65, "max_tokens=64"), ("logprobs", 2000, "[0, 1000]")],
)  # fmt: skip
def test_the_message_names_the_limit(name, value, limit):
    with pytest.raises(ValueError, match=re.escape(limit)):
        SamplingParams(**{name: value})


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize must be True"):
        SamplingParams(stop="x", detokenize=False)


def test_unknown_keywords_are_type_errors_that_name_them():
    for call in (SamplingParams, EngineConfig):
        with pytest.raises(TypeError, match="temprature"):
            call(temprature=1)
    with pytest.raises(TypeError, match="sampler"):
        LLMEngine(EngineConfig(), runner=SlotRunner(4, 4), sampler=object())
    with pytest.raises(TypeError, match="max_tokens"):
        engine().add_request([1], max_tokens=5)


def test_good_values_of_other_types_are_taken_and_normalised():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), top_p=Fraction(1, 2), seed=np.int32(-4), max_tokens=np.int64(5),
        stop_token_ids=(i for i in (np.int64(1), 2)), stop="END", logprobs=np.int8(2),
    )  # fmt: skip
    assert (params.top_k, params.top_p, params.stop_token_ids, params.stop) == (3, 0.5, (1, 2), ("END",))
    assert [type(v) for v in (params.temperature, params.top_k, params.seed, params.max_tokens)] == [
        float, int, int, int,
    ]  # fmt: skip
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop=None, stop_token_ids=None, max_tokens=None).stop_token_ids == ()


def test_greedy_with_top_p_is_one_valid_request():
    params = SamplingParams(temperature=0, top_p=0.9, top_k=5)
    assert (params.temperature, params.top_p) == (0.0, 0.9)


BAD_CONFIG = {
    "max_num_seqs": [0, -1, 1.5, "4", None, True, NAN, 2**31],
    "max_num_batched_tokens": [0, None, 8.0],
    "max_mixed_prefill_tokens": [0, -1, 8.0],
    "max_model_len": [0, 1, -5, None],
    "block_size": [0, -16, 16.0, True, "16", 2**31],
    "num_blocks": [0, -1, 2.5, 2**31],
    "policy": ["fifo", None, [], 3],
    "enable_prefix_caching": [1, None, "yes"],
    "watermark": [-0.1, 0.6, NAN, INF, None, "0", True],
    "overlap": [2, -1, True, 0.0, 1.0, "1"],
    "vocab_size": [0, -1, 1.5, True],
    "eos_token_ids": [5, "5", [-1], [1.5], [True], None, [None]],
    "seed": [1.5, None, "1", True, NAN],
    "device": [0, None, ""],
    "dtype": ["int8", None, 16],
    "attention": ["flash3", None, 1],
    "gpu_memory_utilization": [0, 1.1, NAN, None, "0.9"],
    "kv_cache_gib": [0, -1, NAN, INF, "1", True],
    "enforce_eager": [0, None],
    "fused_kernels": [1, None],
    "tensor_parallel_size": [0, None, 1.0, True],
}


@pytest.mark.parametrize(("name", "value"), cases(BAD_CONFIG))
def test_bad_config_value(name, value):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    assert name in str(error.value)
    shown = value[0] if name == "eos_token_ids" and isinstance(value, list) else value
    assert repr(shown) in str(error.value)


def test_every_config_field_is_in_the_table():
    assert set(BAD_CONFIG) == set(EngineConfig.names())


def test_config_takes_numpy_numbers_and_lists_and_makes_them_plain():
    config = EngineConfig(max_num_seqs=np.int64(4), overlap=np.int64(1), watermark=np.float32(0.25),
                          eos_token_ids=[2, 3], seed=np.int64(9))  # fmt: skip
    assert (config.max_num_seqs, config.overlap, config.eos_token_ids, config.seed) == (4, 1, (2, 3), 9)
    assert type(config.max_num_seqs) is int and type(config.watermark) is float


# prompts: pool of 8 blocks of 4 = 32 tokens, max_model_len 24, vocabulary 50

BAD_PROMPTS = [
    ([], "prompt is empty"),
    (np.array([], np.int64), "prompt is empty"),
    (iter(()), "prompt is empty"),
    ("hello", "prompt_token_ids must be a list of token ids, got str"),
    (b"hello", "prompt_token_ids must be a list of token ids, got bytes"),
    (5, "prompt_token_ids must be a list of token ids, got int"),
    (None, "prompt_token_ids must be a list of token ids, got NoneType"),
    (np.array(5), "prompt_token_ids must be a list of token ids, got ndarray"),
    ([1, "2"], "prompt_token_ids[1] must be an integer, got '2'"),
    ([1, 2.0], "prompt_token_ids[1] must be an integer, got 2.0"),
    ([1, NAN], "prompt_token_ids[1] must be an integer, got nan"),
    ([True], "prompt_token_ids[0] must be an integer, got True"),
    ([np.True_], "prompt_token_ids[0] must be an integer"),
    ([1, None], "prompt_token_ids[1] must be an integer, got None"),
    ([[1, 2]], "prompt_token_ids[0] must be an integer, got [1, 2]"),
    (np.array([[1, 2], [3, 4]]), "prompt_token_ids[0] must be an integer"),
    (np.array([[1], [3]]), "prompt_token_ids[0] must be an integer"),
    (np.array([1.0, 2.0]), "prompt_token_ids[0] must be an integer"),
    ([1, -1], "prompt_token_ids[1] is -1, outside the vocabulary [0, 50)"),
    ([50], "prompt_token_ids[0] is 50, outside the vocabulary [0, 50)"),
    ([2**70], f"prompt_token_ids[0] is {2**70}, outside the vocabulary [0, 50)"),
    ([1] * 24, "prompt has 24 tokens, max_model_len=24"),
    ([1] * 1000, "prompt has 1000 tokens, max_model_len=24"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[m[:60] for _, m in BAD_PROMPTS])
def test_bad_prompt_is_refused_and_the_engine_goes_on(prompt, message):
    eng = engine(8, 4, max_model_len=24)
    running = eng.add_request([1, 2, 3])
    eng.step()
    before = eng.block_manager.num_free_blocks
    with pytest.raises(ValueError, match=re.escape(message)):
        eng.add_request(prompt)
    assert eng.block_manager.num_free_blocks == before
    assert list(eng.sequences.values()) == [running] and not eng.scheduler.waiting
    after = eng.add_request([4, 5])
    finish(eng)
    for seq in (running, after):
        assert_right(eng, seq)
    assert_empty(eng)


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_blocks_nobody():
    eng = engine(2, 256, max_model_len=4096)  # engine_cases 2 and 7
    with pytest.raises(ValueError, match="prompt has 600 tokens, the whole KV pool holds 512"):
        eng.add_request([1] * 600)
    seq = eng.add_request([1] * 512)
    finish(eng)
    assert_right(eng, seq)
    assert seq.num_output_tokens == 1


def failing_tokens():
    yield 1
    raise OSError("disk")


def test_a_generator_that_fails_queues_nothing():
    eng = engine()
    with pytest.raises(OSError, match="disk"):
        eng.add_request(failing_tokens())
    assert_empty(eng)


def test_an_endless_generator_is_refused():
    with pytest.raises(ValueError, match="prompt has at least 4096 tokens"):
        engine().add_request(itertools.repeat(1))


@pytest.mark.parametrize("prompt", [(1, 2, 3), np.array([1, 2, 3], np.int32), [np.int64(1), 2, 3], range(1, 4)])
def test_prompts_of_many_kinds_become_plain_ints(prompt):
    eng = engine()
    seq = eng.add_request(prompt)
    assert seq.token_ids == [1, 2, 3] and {type(t) for t in seq.token_ids} == {int}
    finish(eng)
    assert_right(eng, seq)


def test_bad_params_object_and_stop_ids_outside_the_vocabulary():
    eng = engine()
    for params in ({"temperature": 1}, SamplingParams, "greedy", [SamplingParams()]):
        with pytest.raises(ValueError, match="sampling_params must be a SamplingParams, got"):
            eng.add_request([1], params)
    with pytest.raises(ValueError, match=f"stop_token_ids contains {VOCAB}, vocabulary has {VOCAB} tokens"):
        eng.add_request([1], SamplingParams(stop_token_ids=[VOCAB]))
    assert_empty(eng)


# limits: nothing large is refused, it ends with "length"


@pytest.mark.parametrize("max_tokens", [10**6, 2**63, 10**30, None])
@pytest.mark.parametrize(("blocks", "max_model_len", "total"), [(8, 24, 24), (4, 24, 17), (4, 17, 17), (4, 18, 17)])
@pytest.mark.parametrize("overlap", [0, 1])
def test_large_max_tokens_ends_with_length(max_tokens, blocks, max_model_len, total, overlap):
    eng = engine(blocks, 4, max_model_len=max_model_len, overlap=overlap)
    seq = eng.add_request([1, 2, 3], SamplingParams(max_tokens=max_tokens))
    finish(eng)
    assert (len(seq.token_ids), seq.finish_reason, seq.stop_reason) == (total, "length", None)
    assert_right(eng, seq)


def test_prompt_500_of_512_ends_at_512():
    eng = engine(64, 16, max_model_len=512)  # engine_cases 6
    seq = eng.add_request([1] * 500, SamplingParams(max_tokens=100))
    shorter = eng.add_request([1] * 500, SamplingParams(max_tokens=11))
    finish(eng)
    assert (len(seq.token_ids), seq.finish_reason) == (512, "length")
    assert (len(shorter.token_ids), shorter.finish_reason) == (511, "length")


def test_requests_without_a_seed_get_different_ones_that_the_engines_seed_fixes():
    def seeds(seed):
        eng = engine(seed=seed)
        return [eng.add_request([1]).seed for _ in range(5)] + [eng.add_request([1], SamplingParams(seed=7)).seed]

    assert len(set(seeds(0) + seeds(1))) == 11 and seeds(0) == seeds(0)
    assert seeds(0)[-1] == 7 and all(0 <= seed < 2**63 for seed in seeds(-(2**63)))
