"""Options that a runner must have, and ids outside the vocabulary, are refused when a request is added."""

from __future__ import annotations

import pytest

from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner

from .helpers import VOCAB, assert_empty, assert_right, engine, finish

OPTIONS = [
    dict(logit_bias={1: 2.0}),
    dict(allowed_token_ids=[1]),
    dict(bad_words_ids=[[1, 2]]),
    dict(bad_words=["a"]),
    dict(prompt_logprobs=0),
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_an_option_that_the_runner_does_not_have_is_refused_by_name(option):
    [(name, value)] = option.items()
    eng = engine()
    with pytest.raises(
        ValueError, match=f"^{name.removesuffix('_ids') if 'bad' in name else name}=.*SlotRunner"
    ):
        eng.add_request([1, 2], SamplingParams(**option))
    assert_empty(eng)
    seq = eng.add_request([1, 2], SamplingParams(logit_bias={}, bad_words=[]))  # asks for nothing
    finish(eng)
    assert_right(eng, seq)


class Willing(SlotRunner):
    supports = ("logit_bias", "allowed_token_ids", "bad_words")


@pytest.mark.parametrize(
    "option",
    [
        dict(logit_bias={0: 1, VOCAB: 2.0}),
        dict(allowed_token_ids=[0, VOCAB]),
        dict(bad_words_ids=[[0, VOCAB]]),
    ],
    ids=str,
)
def test_ids_of_options_lie_in_the_vocabulary(option):
    [name] = option
    config = EngineConfig(vocab_size=VOCAB, max_model_len=64)
    eng = LLMEngine(config, runner=Willing(16, 4, VOCAB))
    with pytest.raises(ValueError, match=f"{name} contains {VOCAB}, vocabulary has {VOCAB}"):
        eng.add_request([1], SamplingParams(**option))
    with pytest.raises(ValueError, match="bad_words=.*'word'.* needs a tokenizer"):
        eng.add_request([1], SamplingParams(bad_words=["word"]))
    with pytest.raises(ValueError, match="prompt_logprobs=1 is not supported by Willing"):
        eng.add_request([1], SamplingParams(prompt_logprobs=1))
    assert_empty(eng)
