"""Logits that are no numbers to draw from: NaN, +inf, all -inf; and options at their extremes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from nanoengine import LLM, EngineConfig, LLMEngine, SamplingParams
from nanoengine.engine.protocols import NO_TOKEN
from nanoengine.loader.weights import dummy_weights
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.model.decoder import Decoder
from nanoengine.runners import make_runner
from tests.model.test_sampler import sample, sequence

NAN, INF = float("nan"), float("inf")
BAD = 100
TINY = dict(load_format="dummy", max_model_len=256, device="cpu", num_blocks=40, block_size=4)
MATES, WRONG = [[1, 5, 7] * 4, [9, 8] * 9], [3, BAD, 4] * 5
KINDS = [dict(temperature=0), dict(temperature=0.8), dict(temperature=0.7, top_p=0.9, top_k=40),
         dict(temperature=0.9, repetition_penalty=1.2), dict(temperature=0, min_tokens=3)]  # fmt: skip


def params(n, **more):
    return [SamplingParams(**{"seed": i, "max_tokens": 7, "ignore_eos": True} | more) for i in range(n)]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_one_request_ends_and_nothing_else_changes(overlap, kind, logprobs):
    kind = kind | dict(logprobs=logprobs)
    with LLM("tiny-llama", overlap=overlap, max_num_batched_tokens=10, **TINY) as llm:
        wanted = llm.generate(MATES, params(2, **kind), use_tqdm=False)
        llm.engine.block_manager.reset()
        row = llm.engine.runner.model.embed_tokens.weight.data[BAD]
        kept = row.clone()
        row.fill_(NAN)
        asked = [MATES[0], WRONG, MATES[1]]
        mixed = [params(2, **kind)[0], params(1, **kind)[0], params(2, **kind)[1]]
        first, bad, second = llm.generate(asked, mixed, use_tqdm=False)
        assert (bad.finish_reason, bad.token_ids, bad.text) == ("error", [], "")
        assert "non-finite logits" in bad.error
        assert bad.logprobs == (None if logprobs is None else [])
        for out, want in ((first, wanted[0]), (second, wanted[1])):
            assert (out.token_ids, out.error) == (want.token_ids, None)
            assert [list(e) for e in out.logprobs or ()] == [list(e) for e in want.logprobs or ()]
        [item] = llm.stream([WRONG], mixed[1])
        assert item.finish_reason == "error" and item.error == bad.error
        row.copy_(kept)  # whoever finds KV of before would show it
        healed, = llm.generate([WRONG], params(1, **kind), use_tqdm=False)
        assert healed.num_cached_tokens == 0 and healed.finish_reason == "length"
        again, = llm.generate([MATES[1]], params(2, **kind)[1:], use_tqdm=False)
        assert again.token_ids == wanted[1].token_ids and again.num_cached_tokens > 0
        llm.engine.block_manager.check_invariants([])


def test_chat_returns_an_output_too():
    with LLM("tiny-llama", **TINY) as llm:
        llm.engine.runner.model.embed_tokens.weight.data[ord("!")] = NAN
        bad, good = llm.chat([[{"role": "user", "content": "a!"}], [{"role": "user", "content": "b"}]],
                             SamplingParams(max_tokens=3), use_tqdm=False)  # fmt: skip
        assert (bad.finish_reason, good.finish_reason) == ("error", "length")


@pytest.mark.parametrize("blocks", [6, 8])
def test_blocks_that_held_nan_are_used_again(blocks):
    """What lies in a block beyond a sequence's own tokens must not reach it."""
    with LLM("tiny-llama", **TINY | dict(num_blocks=blocks)) as llm:
        wanted = llm.generate(MATES, params(2, temperature=0), use_tqdm=False)
        llm.engine.runner.model.embed_tokens.weight.data[BAD] = NAN
        for _ in range(3):
            bad, = llm.generate([WRONG], params(1, temperature=0), use_tqdm=False)
            assert bad.finish_reason == "error"
            for mate, want in zip(MATES, wanted, strict=True):
                out, = llm.generate([mate], params(1, temperature=0), use_tqdm=False)
                assert out.token_ids == want.token_ids


def test_a_weight_that_only_some_prompts_reach():
    """NaN in an embedding reaches who has the token, if only in its answer; in a layer, everyone."""
    with LLM("tiny-llama", **TINY) as llm:
        free, = llm.generate([MATES[0]], params(1, temperature=0), use_tqdm=False)
        llm.engine.runner.model.embed_tokens.weight.data[free.token_ids[3]] = NAN
        llm.engine.block_manager.reset()
        out, = llm.generate([MATES[0]], params(1, temperature=0), use_tqdm=False)
        at = free.token_ids.index(free.token_ids[3])
        assert (out.finish_reason, out.token_ids) == ("error", free.token_ids[: at + 1])
        llm.engine.runner.model.layers[2].mlp.down_proj.weight.data[0, 0] = NAN
        assert {o.finish_reason for o in llm.generate(MATES, params(2), use_tqdm=False)} == {"error"}
        assert llm.engine.block_manager.num_free_blocks == 40


@pytest.mark.parametrize("value", [NAN, INF, -NAN])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_logit_is_enough(value, kind):
    """Also one that min_tokens rules out, and also with a sampler of one's own."""
    for sampler in (None, lambda logits, seqs, positions: logits.nan_to_num().argmax(-1)):
        eng = made(WithLogits(lambda logits: logits.index_fill_(1, torch.tensor([2]), value)), sampler)
        seq = eng.add_request([1, 2], SamplingParams(max_tokens=4, **kind))
        for _ in eng.run():
            pass
        assert (seq.finish_reason, seq.output_ids) == ("error", []) and "non-finite" in seq.error


def test_a_model_that_rules_all_tokens_out_and_one_that_rules_out_all_but_one():
    for left, reason, ids in ((slice(0, 0), "error", []), (slice(7, 8), "length", [7] * 4)):
        def only(logits, left=left):
            kept = logits[:, left].clone()
            logits.fill_(-INF)[:, left] = kept
            return logits

        for kind in (*KINDS, dict(top_p=0.1), dict(min_p=1.0), dict(top_k=3, logprobs=5)):
            eng = made(WithLogits(only))
            seq = eng.add_request([1, 2], SamplingParams(max_tokens=4, ignore_eos=True, **kind))
            for _ in eng.run():
                pass
            assert (seq.finish_reason, seq.output_ids) == (reason, ids), kind
            if reason == "error":
                assert "no token may be drawn" in seq.error
            for entry in seq.logprobs or ():
                assert not any(math.isnan(value) for value in entry.values())


class WithLogits(Decoder):
    """tiny-llama whose logits go through ``change``."""

    def __init__(self, change):
        super().__init__(NAMED_CONFIGS["tiny-llama"], 256)
        self.load_weights(dummy_weights(NAMED_CONFIGS["tiny-llama"]))
        self.change = change

    def logits(self, hidden):
        return self.change(super().logits(hidden))


def made(model, sampler=None, **settings):
    sizes = dict(vocab_size=1024, max_model_len=256, num_blocks=20, eos_token_ids=(2,))
    config = EngineConfig(device="cpu", **sizes, **settings)
    return LLMEngine(config, make_runner(config, model=model, sampler=sampler))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("token", [1024, 2**40, -3])
def test_a_sampler_that_leaves_the_vocabulary_is_named(overlap, token):
    def leaves(logits, seqs, positions):
        tokens = logits.argmax(-1)
        tokens[[len(seq.token_ids) > 3 for seq in seqs]] = token
        return tokens

    eng = made(WithLogits(lambda logits: logits), leaves, overlap=overlap)
    seq = eng.add_request([1, 2], SamplingParams(max_tokens=9))
    with pytest.raises(RuntimeError, match=rf"token id {token}, outside the vocabulary \[0, 1024\)"):
        for _ in eng.run():
            pass
    eng.abort(seq)
    assert eng.block_manager.num_free_blocks == 20


def test_an_embedding_that_lacks_rows_is_refused():
    model = WithLogits(lambda logits: logits)
    model.embed_tokens.weight.data = model.embed_tokens.weight.data[:1000]
    with pytest.raises(ValueError, match="embed_tokens has 1000 rows, config.vocab_size is 1024"):
        made(model)


# all tokens banned


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("temperature", [0, 1])
def test_all_ids_banned_is_an_error_of_that_request(overlap, temperature):
    with LLM("tiny-llama", overlap=overlap, **TINY) as llm:
        kind = dict(temperature=temperature, seed=4, max_tokens=6, ignore_eos=True)
        alone, = llm.generate([[5, 6]], SamplingParams(**kind), use_tqdm=False)
        banned = SamplingParams(stop_token_ids=range(1024), min_tokens=2, **kind)
        bad, mate = llm.generate([[5, 6], [5, 6]], [banned, SamplingParams(**kind)], use_tqdm=False)
        assert (bad.finish_reason, bad.token_ids) == ("error", []) and "no token may be drawn" in bad.error
        assert mate.token_ids == alone.token_ids
        but_one = SamplingParams(stop_token_ids=[*range(9), *range(10, 1024)], min_tokens=2, **kind)
        out, = llm.generate([[5, 6]], but_one, use_tqdm=False)
        assert out.token_ids[:2] == [9, 9] and out.finish_reason in ("stop", "length")


def test_an_end_token_beyond_the_logits_is_nothing_to_hold_back():
    seq = sequence(ends=[3, 12, 999], min_tokens=2, temperature=0)
    assert sample([0.0] * 3 + [5.0] + [1.0] * 8, [seq]) == [4]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_sampler_says_where_no_token_is_left(kind):
    seqs = [sequence(**kind), sequence(**kind)]
    logits = torch.full((2, 12), -INF)
    logits[1, 7] = -2.0
    assert sample(logits, seqs) == [NO_TOKEN, 7]


# extremes


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-9, 1e4])
@pytest.mark.parametrize("top", [65504.0, 3e38, 1e-30])
@pytest.mark.parametrize("more", [{}, dict(top_p=0.5), dict(min_p=0.1), dict(top_k=2)], ids=str)
def test_extreme_temperatures_draw_a_token(temperature, top, more):
    logits = torch.linspace(-top, top, 12)
    tokens = sample(logits.repeat(40, 1), [sequence(temperature=temperature, seed=i, **more) for i in range(40)])
    assert all(0 <= token < 12 for token in tokens)
    if temperature < 1 and top > 1:
        assert set(tokens) == {11} or top > 1e38  # of scores beyond float32 any may win, but none that is lower


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-3, 1e4])
@pytest.mark.parametrize("scale", [0.0, 1.0, 65504.0, 3e38])
@pytest.mark.parametrize("temperature", [0, 1e-300, 1.0, 1e4])
def test_penalties_that_overflow_draw_a_token(penalty, scale, temperature):
    logits = torch.linspace(-1, 1, 12) * scale
    logits[3] = -INF
    seq = sequence(range(12), (1, 3), repetition_penalty=penalty, presence_penalty=2.0, frequency_penalty=-2.0,
                   temperature=temperature)  # fmt: skip
    [token] = sample(logits, [seq])
    assert 0 <= token < 12 and token != 3


def test_a_token_that_the_model_rules_out_is_never_drawn_however_it_is_rewarded():
    logits = torch.full((1, 12), -INF)
    logits[0, 5] = -1e30
    for kind in (dict(repetition_penalty=1e-300), dict(frequency_penalty=-2.0), dict(temperature=1e-300)):
        assert sample(logits, [sequence(range(12), (1, 1, 1), **kind)]) == [5]


def test_what_the_command_line_prints_is_json(capsys):
    from nanoengine.cli import _as_json
    from nanoengine.outputs import RequestOutput

    out = RequestOutput(0, "a", [1], [2], logprobs=[{2: -INF, 3: -0.5}], metrics={"arrival": 0.0})
    text = json.dumps(_as_json(out), allow_nan=False)
    assert json.loads(text)["logprobs"] == [{"2": -9999.0, "3": -0.5}]


def test_ids_of_files_beyond_the_vocabulary_cannot_end_a_step():
    """EngineConfig: eos_token_ids and vocab_size fit together, or are refused."""
    with pytest.raises(ValueError, match="eos_token_ids contains 999, vocab_size is 276"):
        EngineConfig(eos_token_ids=(2, 999), vocab_size=276)
    with pytest.raises(ValueError, match="eos_token_ids contains 2, vocab_size is 2"):
        LLM("tiny-llama", load_format="dummy", vocab_size=2)
    assert EngineConfig(eos_token_ids=(2, 275), vocab_size=276).eos_token_ids == (2, 275)
    assert EngineConfig(eos_token_ids=np.array([7])).eos_token_ids == (7,)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("budget", [16, 400])
def test_an_innocent_prompt_with_the_same_beginning_goes_on(overlap, budget):
    """Masked attention adds 0 * NaN: KV before the bad token is NaN, too, and is shared at once."""
    same, more = [1, 2, 3, 4, 5, 6, 7, 8], dict(overlap=overlap, max_num_batched_tokens=budget)
    wrong, good = [*same, BAD] + [3] * 20, same + [9] * 3
    with LLM("tiny-llama", **TINY, **more) as llm:
        wanted, = llm.generate([good], params(1, temperature=0), use_tqdm=False)
        llm.reset_prefix_cache()
        llm.engine.runner.model.embed_tokens.weight.data[BAD] = NAN
        bad, out = llm.generate([wrong, good], params(1, temperature=0) * 2, use_tqdm=False)
        assert bad.finish_reason == "error"
        assert (out.token_ids, out.error) == (wanted.token_ids, None)
