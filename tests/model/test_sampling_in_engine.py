"""Sampling through the whole engine: one request's tokens do not depend on who else runs, or how."""

from __future__ import annotations

import random

import pytest
import torch

from nanoengine import EngineConfig, LLMEngine, SamplingParams
from nanoengine.engine.sequence import Sequence
from nanoengine.loader.weights import dummy_weights
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.model.decoder import Decoder
from nanoengine.runners import make_runner
from nanoengine.worker.sampler import report_logprobs

VOCAB = 1024


@pytest.fixture(scope="module")
def model() -> Decoder:
    decoder = Decoder(NAMED_CONFIGS["tiny-qwen3"], 256)
    decoder.load_weights((name, value * 4 if value.dim() == 2 else value) for name, value in
                         dummy_weights(NAMED_CONFIGS["tiny-qwen3"]))  # fmt: skip
    return decoder.eval()


def engine(model, **settings) -> LLMEngine:
    settings = {
        "max_model_len": 256,
        "vocab_size": VOCAB,
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 300,
    } | settings
    return LLMEngine(config := EngineConfig(**settings), make_runner(config, model=model))


def run(eng: LLMEngine, requests) -> list[Sequence]:
    seqs = [eng.add_request(prompt, params) for prompt, params in requests]
    for _ in eng.run():
        pass
    return seqs


KINDS = [
    dict(temperature=0),
    dict(temperature=0.8, top_p=0.9),
    dict(temperature=1.3, top_k=50),
    dict(min_p=0.02, temperature=2.0),
    dict(temperature=0.0, repetition_penalty=1.8),
    dict(temperature=1.0, frequency_penalty=1.5, presence_penalty=-0.5),
    dict(temperature=1.0),
    dict(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=0.7),
]


def requests() -> list:
    rng = random.Random(1)
    return [
        ([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))],
         SamplingParams(seed=i, max_tokens=20, ignore_eos=True, logprobs=i % 3, **kind))
        for i, kind in enumerate(KINDS)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    """Each request on an engine of its own."""
    return [run(engine(model), [request])[0].output_ids for request in requests()]


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(overlap=1),
        dict(max_num_batched_tokens=7),
        dict(num_blocks=17),
        dict(num_blocks=17, overlap=1, max_num_batched_tokens=9),
        dict(num_blocks=17, overlap=1, policy="prefill_first"),
        dict(max_num_seqs=3, block_size=1, num_blocks=130, overlap=1),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "batched",
)
def test_same_tokens_alone_in_any_batch_chunked_preempted_overlapped(model, alone, settings):
    order = list(range(len(KINDS)))
    for seed in (0, 1):
        random.Random(seed).shuffle(order)
        eng = engine(model, **settings)
        wanted = requests()
        seqs = run(eng, [wanted[i] for i in order])
        assert [seq.output_ids for seq in seqs] == [alone[i] for i in order]
        if "num_blocks" in settings:
            assert eng.scheduler.num_preemptions > 0


def test_without_a_seed_requests_differ_and_engines_agree(model):
    free = [([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True))] * 3
    first, again, other = (run(engine(model, seed=s), free) for s in (0, 0, 1))
    texts = [tuple(seq.output_ids) for seq in (*first, *other)]
    assert len(set(texts)) == 6
    assert [seq.output_ids for seq in first] == [seq.output_ids for seq in again]


@pytest.mark.parametrize("settings", [dict(), dict(overlap=1), dict(num_blocks=17, overlap=1)])
def test_penalties_are_those_of_the_whole_text(model, settings):
    """Teacher-forced brute force: each token is the argmax after penalties counted from scratch."""
    wanted = requests()
    for seq in run(engine(model, **settings), wanted):
        p = seq.params
        if p.temperature or not p.needs_history:
            continue
        from nanoengine.model.decoder import full_forward

        logits = full_forward(model, seq.token_ids[:-1]).double()
        for position in range(seq.num_prompt_tokens, len(seq.token_ids)):
            row, before = logits[position - 1].clone(), seq.token_ids[:position]
            output = before[seq.num_prompt_tokens :]
            for token in set(before):
                row[token] *= p.repetition_penalty if row[token] < 0 else 1 / p.repetition_penalty
            for token in set(output):
                row[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
            assert row[seq.token_ids[position]] >= row.max() - 1e-4


@pytest.mark.parametrize("settings", [dict(), dict(overlap=1), dict(num_blocks=17, overlap=1)])
def test_logprobs_are_in_step_with_the_tokens(model, settings):
    for seq in run(engine(model, **settings), requests()):
        assert len(seq.logprobs) == len(seq.output_ids) == 20
        for token, entry in zip(seq.output_ids, seq.logprobs, strict=True):
            assert token in entry and seq.params.logprobs <= len(entry) <= seq.params.logprobs + 1
            assert all(value <= 0 for value in entry.values())


@pytest.mark.parametrize("overlap", [0, 1])
def test_min_tokens(model, overlap):
    """The end token is the likeliest at every step, and comes at the first step at which it may."""
    prompt = [1, 2, 3]
    likeliest = run(engine(model), [(prompt, SamplingParams(temperature=0, max_tokens=1))])[0].output_ids[0]
    for n in (0, 1, 3):
        params = SamplingParams(temperature=0, max_tokens=30, min_tokens=n, stop_token_ids=range(0, VOCAB, 2))
        params_all = SamplingParams(temperature=0, max_tokens=30, min_tokens=n, stop_token_ids=[likeliest])
        for p in (params, params_all):
            seq = run(engine(model, overlap=overlap), [(prompt, p)])[0]
            assert len(seq.output_ids) > n or seq.finish_reason == "length"
            assert not set(seq.output_ids[:n]) & set(p.stop_token_ids)


class Own:
    """The least that a sampler must be: no logprobs, tokens as whatever ``make`` gives."""

    def __init__(self, make):
        self.make = make

    def __call__(self, logits, seqs, positions):
        return self.make(logits.argmax(-1))


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.int(), lambda t: t.tolist(), lambda t: t.numpy()])
def test_own_sampler_needs_one_method_only(model, make):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    want = run(engine(model), [([1, 2], params)])[0]
    config = EngineConfig(vocab_size=VOCAB, max_model_len=256, num_blocks=9)
    eng = LLMEngine(config, make_runner(config, model=model, sampler=Own(make)))
    got = run(eng, [([1, 2], params)])[0]
    assert (got.output_ids, got.logprobs) == (want.output_ids, want.logprobs)


@pytest.mark.parametrize("make", [lambda t: t[:, None], lambda t: t.float(), lambda t: t[:0], lambda t: t > 0])
def test_a_sampler_that_returns_something_else_is_named(model, make):
    config = EngineConfig(vocab_size=VOCAB, max_model_len=256, num_blocks=9)
    eng = LLMEngine(config, make_runner(config, model=model, sampler=Own(make)))
    seq = eng.add_request([1, 2])
    with pytest.raises(RuntimeError, match="the sampler returned .* expected one integer token id for each of the 1 "):
        eng.step()
    eng.abort(seq)
    assert eng.block_manager.num_free_blocks == 9


@pytest.mark.parametrize("settings", [dict(vocab_size=None), dict(vocab_size=1025), dict(max_model_len=257)])
def test_limits_beyond_the_decoder_are_refused(model, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        engine(model, **settings)


# logprobs


@pytest.mark.parametrize("wanted", [0, 1, 3, 1000])
def test_logprobs_are_log_softmax_of_the_raw_logits(wanted):
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(3))
    seqs = [sequence(logprobs=wanted, temperature=5.0), sequence(temperature=0)]
    worst = logits[0].argmin()
    first, second = report_logprobs(logits, seqs, torch.stack((worst, logits[1].argmax())))
    expected = logits[0].double().log_softmax(-1)
    top = expected.topk(min(wanted, 20)).indices.tolist()
    assert set(first) == {*top, worst.item()}
    assert list(first)[: len(top)] == top, "likeliest first"
    for token, value in first.items():
        assert value == pytest.approx(expected[token].item(), abs=1e-5)
    assert second == {}


def test_a_chosen_token_in_the_top_is_listed_once():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert list(report_logprobs(logits, [sequence(logprobs=2)], torch.tensor([1]))[0]) == [1, 2]


def test_no_logprobs_cost_nothing():
    assert report_logprobs(torch.zeros(1, 3), [sequence()], torch.tensor([0])) is None


def sequence(**params) -> Sequence:
    return Sequence(0, [0], SamplingParams(**params), max_total_tokens=10**9)
