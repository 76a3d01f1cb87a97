"""A row of NaN in the GPU's runner, on a CPU: eager and as graphs have it, with a step in flight behind it."""

import dataclasses

import pytest
import torch

from nanoengine import SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from tests.kernels.test_graph_fuzz import decoder
from tests.kernels.unrecorded import give_graphs

BAD = 20
MATES = [[5, 9, 31], [11, 12, 13]]
WRONG = [47, BAD, 4, 50]
KINDS = {
    "greedy": dict(temperature=0),
    "drawn": dict(temperature=50),
    "logprobs": dict(temperature=50, logprobs=2),
}


def outputs(engine, prompts, kinds):
    seqs = []
    for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        params = SamplingParams(seed=i, max_tokens=3, ignore_eos=True, **kind)
        seqs.append(engine.add_request(prompt, params))
    for _ in engine.run():
        pass
    engine.block_manager.check_invariants([])
    return seqs


def runner_of(config, graphs):
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.model.config import ModelConfig
    from nanoengine.worker.gpu_runner import GpuRunner

    shape = ModelConfig("Qwen3ForCausalLM", 64, 32, 48, 1, 4, 2, 16, 64, qk_norm=True, dtype="float32")
    runner = GpuRunner(config, model=decoder(shape), attention=TritonAttention(2))
    return runner, give_graphs(runner, config) if graphs else []


@pytest.mark.parametrize(("graphs", "overlap", "name"), [(False, 0, "greedy"), (True, 1, "logprobs")])
def test_one_request_ends_and_its_mates_do_not_notice(graphs, overlap, name):
    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=8,
                          num_blocks=9, device="cpu", overlap=overlap)  # fmt: skip
    runner, replays = runner_of(config, graphs)
    row = runner.model.embed_tokens.weight.data[BAD]
    kept, kind = row.clone(), KINDS[name]
    wanted = outputs(LLMEngine(config, runner=runner), MATES, [kind, kind])
    assert not any(BAD in seq.output_ids for seq in wanted)
    row.fill_(float("nan"))
    engine = LLMEngine(config, runner=runner)
    *mates, bad = outputs(engine, [*MATES, WRONG], [kind] * 3)
    assert (bad.finish_reason, bad.output_ids) == ("error", []) and "non-finite logits" in bad.error
    assert [seq.output_ids for seq in mates] == [seq.output_ids for seq in wanted]
    row.copy_(kept)
    healed, = outputs(engine, [WRONG], [KINDS["greedy"]])
    assert healed.num_cached_tokens == 0 and healed.finish_reason == "length"
    if graphs:
        assert {kind for kind, _ in replays} == {"DecodeGraphs", "MixedGraphs"}


@pytest.mark.parametrize(("graphs", "drawn"), [(False, False), (True, True)])
def test_nan_that_comes_with_a_drawn_token_while_the_next_step_is_launched(graphs, drawn):
    """The step behind the bad one is fed with no token at all, from the device, before the host has heard of it."""
    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=8,
                          num_blocks=9, device="cpu", overlap=1)  # fmt: skip
    runner, _ = runner_of(config, graphs)
    kind = KINDS["drawn" if drawn else "greedy"]
    free, mate = outputs(LLMEngine(config, runner=runner), MATES, [kind, kind])
    token = next(token for token in free.output_ids[:-1] if token not in mate.output_ids + MATES[1])
    at = free.output_ids.index(token)
    runner.model.embed_tokens.weight.data[token] = float("nan")
    bad, same = outputs(LLMEngine(config, runner=runner), MATES, [kind, kind])
    assert (bad.finish_reason, bad.output_ids) == ("error", free.output_ids[: at + 1])
    assert same.output_ids == mate.output_ids


@pytest.mark.parametrize("graphs", [False, True])
def test_a_sampler_that_leaves_the_vocabulary_feeds_no_step_with_it(graphs):
    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=8,
                          num_blocks=9, device="cpu", overlap=1)  # fmt: skip
    runner, _ = runner_of(config, graphs)
    runner.sampler = lambda logits, seqs, at: torch.full((len(seqs),), 64)
    runner.mode = dataclasses.replace(runner.mode, kernel_samples=False)
    engine = LLMEngine(config, runner=runner)
    engine.add_request([1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(RuntimeError, match=r"token id 64, outside the vocabulary \[0, 64\)"):
        for _ in engine.run():
            pass
