"""Random requests through the GPU's runner, every step a replay, against the plain runner: the same tokens.

``python -m tests.kernels.test_graph_fuzz FIRST LAST`` runs further seeds.
"""

import random
import sys

import pytest

from nanoengine import SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.worker.model_runner import ModelRunner


def settings_of(draw: random.Random) -> dict:
    """Limits so small that prompts are cut, rows wait, and blocks run out."""
    rows = draw.randint(1, 5)
    budget = draw.choice([rows, rows + 1, 7, 16, 40])
    return dict(max_model_len=64, max_num_seqs=min(rows, budget), max_num_batched_tokens=budget, device="cpu",
                num_blocks=draw.randint(4, 12), policy=draw.choice(["token_budget", "prefill_first"]),
                enable_prefix_caching=draw.random() < 0.6)  # fmt: skip


def requests_of(draw: random.Random) -> list[tuple[int, list[int], SamplingParams]]:
    """(step before which it comes, prompt, options); so hot that a draw is seldom the likeliest token"""
    shared = [draw.randrange(64) for _ in range(32)]
    requests = []
    for number in range(draw.randint(1, 6)):
        own = [draw.randrange(64) for _ in range(draw.choice([1, 2, 9, 20]))]
        prompt = shared[: draw.choice([0, 16, 20, 32])] + own
        options = draw.choice([dict(temperature=0), dict(temperature=50), dict(temperature=50, top_k=5),
                               dict(logprobs=2), dict(repetition_penalty=1.3, temperature=0),
                               dict(prompt_logprobs=2, temperature=0), dict(logit_bias={5: 3, 9: -9}),
                               dict(allowed_token_ids=range(9, 30), prompt_logprobs=0, temperature=50),
                               dict(bad_words_ids=[[i] for i in range(9)] + [[20, 21], [30, 31, 32]]),
                               ])  # fmt: skip
        params = SamplingParams(**options, seed=number, max_tokens=draw.randint(1, 6), ignore_eos=True)
        requests.append((draw.randint(0, 6), prompt, params))
    return sorted(requests, key=lambda request: request[0])


def outputs(runner, config, requests):
    engine = LLMEngine(config, runner=runner)
    waiting, seqs, step = list(requests), [], 0
    while waiting or engine.has_unfinished():
        while waiting and (waiting[0][0] <= step or not engine.has_unfinished()):
            _, prompt, params = waiting.pop(0)
            seqs.append(engine.add_request(prompt, params))
        engine.step()
        engine.block_manager.check_invariants(engine.sequences.values())
        step += 1
    reports = [(seq.logprobs, (seq.prompt_logprobs or [])[1:]) for seq in seqs]
    return [(seq.output_ids, [[sorted(entry) for entry in report or ()] for report in both])
            for seq, both in zip(seqs, reports, strict=True)]  # fmt: skip


def shape_of(draw: random.Random):
    """A model's shape, and the rest that kernels are compiled for: block size, spare pieces."""
    from nanoengine.model.config import ModelConfig

    kv_heads, group, d = draw.choice([1, 1, 2, 3, 8]), draw.choice([1, 2, 5, 7]), draw.choice([16, 24, 80])
    vocabulary, layers = draw.choice([64, 77]), draw.randint(1, 2)
    shape = ModelConfig("Qwen3ForCausalLM", vocabulary, 32, 48, layers, kv_heads * group, kv_heads, d, 64,
                        tie_word_embeddings=draw.random() < 0.5, attention_bias=draw.random() < 0.3,
                        qk_norm=draw.random() < 0.5, qkv_bias=draw.random() < 0.3, dtype="float32")  # fmt: skip
    return shape, draw.choice([16, 17, 48, 256]), draw.choice([0, 1, 3])


def decoder(shape, positions: int = 64):
    from nanoengine.loader.weights import dummy_weights
    from nanoengine.model.decoder import Decoder

    made = Decoder(shape, positions)
    made.load_weights((name, 10 * weight) for name, weight in dummy_weights(shape))
    return made.eval()


def check(shape, settings, requests, seed) -> None:
    import torch

    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.worker.gpu_runner import GpuRunner
    from tests.kernels.unrecorded import give_graphs

    config = EngineConfig(vocab_size=shape.vocab_size, **settings)
    wanted = outputs(ModelRunner(config, model=decoder(shape)), config, requests)
    group = shape.num_attention_heads // shape.num_key_value_heads
    attention = TritonAttention(group, shape.num_key_value_heads)
    runner = GpuRunner(config, model=decoder(shape), attention=attention)
    for cache in runner.layer_caches:  # what a block held before must not matter
        cache.fill_(torch.nan)
    replays = give_graphs(runner, config)
    assert outputs(runner, config, requests) == wanted, (seed, shape, settings, requests)
    assert replays


@pytest.mark.parametrize("seed", [0, 1, 3])  # each takes seconds, 2 takes minutes
def test_tokens_are_those_of_the_plain_runner(seed):
    from tests.kernels.test_gpu_runner import one_layer

    draw = random.Random(seed)
    check(one_layer(True).config, settings_of(draw), requests_of(draw), seed)


@pytest.mark.parametrize("seed", [1000])
def test_tokens_of_any_shape(seed, monkeypatch):
    """One KV head or eight, groups and heads that are no power of two, large and odd blocks, few or no spare pieces."""
    from nanoengine.attention import triton_attention

    draw = random.Random(seed)
    shape, block_size, spare = shape_of(draw)
    monkeypatch.setattr(triton_attention, "extra_kv_splits", lambda rows, kv_heads: spare)
    check(shape, settings_of(draw) | {"block_size": block_size}, requests_of(draw), seed)


if __name__ == "__main__":
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        if number < 1000:
            test_tokens_are_those_of_the_plain_runner(number)
        else:
            with pytest.MonkeyPatch.context() as patch:
                test_tokens_of_any_shape(number, patch)
        print(number, "equal", flush=True)
