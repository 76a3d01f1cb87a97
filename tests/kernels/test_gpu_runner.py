"""The GPU's runner on a CPU: kernels in Triton's interpreter, everything but graphs and streams."""

import numpy as np
import pytest

from nanoengine import SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.scheduler import TokenBudgetScheduler
from nanoengine.worker.model_runner import ModelRunner
from tests.kernels.test_graph_fuzz import decoder
from tests.kernels.unrecorded import give_graphs

PROMPTS = [[5, 9, 20, 7, 8, 31, 2, 47, 4, 50], [11, 12, 13]]


def outputs(runner, config, params, **parts):
    engine = LLMEngine(config, runner=runner, **parts)
    seqs = [engine.add_request(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    for _ in engine.run():
        engine.block_manager.check_invariants(engine.sequences.values())
    reports = [seq.logprobs and [sorted(entry) for entry in seq.logprobs] for seq in seqs]
    for seq in seqs:
        if seq.params.prompt_logprobs is not None:
            assert len(seq.prompt_logprobs) == seq.num_prompt_tokens
            reports += [sorted(entry) for entry in seq.prompt_logprobs[1:]]
    return [seq.output_ids for seq in seqs], reports


def one_layer(qk_norm: bool):
    from nanoengine.model.config import ModelConfig

    kind = "Qwen3ForCausalLM" if qk_norm else "Qwen2ForCausalLM"
    shape = ModelConfig(kind, 64, 32, 48, 1, 4, 2, 16, 64, qk_norm=qk_norm, qkv_bias=not qk_norm, dtype="float32")
    return decoder(shape)


@pytest.mark.parametrize(("qk_norm", "graphs"), [(True, False), (False, False), (True, True), (False, True)])
def test_tokens_are_those_of_the_plain_runner(qk_norm, graphs):
    """A chunked prompt, a mixed step, two rows, one row; greedy, drawn, with logprobs; depth 0 and 1.

    graphs: every step is a replay (of a step that runs each time, where there is no GPU to record it).
    """
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.worker.gpu_runner import GpuRunner

    settings = dict(max_model_len=40, max_num_seqs=2, max_num_batched_tokens=8, num_blocks=5, device="cpu")
    config = EngineConfig(vocab_size=64, **settings)
    plain = ModelRunner(config, model=one_layer(qk_norm))
    ours = GpuRunner(config, model=one_layer(qk_norm), attention=TritonAttention(2))
    assert ours.overlap == 1 and not ours.fusion.left and ours.fusion.split_k
    replays = give_graphs(ours, config) if graphs else []
    for params in (
        [SamplingParams(temperature=0, max_tokens=4), SamplingParams(temperature=50, seed=3, max_tokens=3)],
        [SamplingParams(seed=5, max_tokens=2, min_tokens=1), SamplingParams(logprobs=2, seed=1, max_tokens=2)],
        [SamplingParams(seed=5, max_tokens=3, logit_bias={7: 9.0}), SamplingParams(max_tokens=2, prompt_logprobs=2)],
        [SamplingParams(seed=6, max_tokens=3, prompt_logprobs=1, bad_words_ids=[[i, i + 1] for i in range(63)]),
         SamplingParams(seed=1, max_tokens=3, allowed_token_ids=[4, 5, 6])],
    ):
        assert outputs(ours, config, params) == outputs(plain, config, params)
    assert set(replays) == ({("DecodeGraphs", 1), ("DecodeGraphs", 2), ("MixedGraphs", 8)} if graphs else set())


def test_a_sampler_of_your_own_is_asked_in_place_of_the_graphs_draw():
    """And its tokens, not the drawn ones, are what the next step is fed, while they are in flight, and what logprobs
    tell of, when a later step has replaced them."""
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.worker.gpu_runner import GpuRunner

    def unlikely(logits, seqs, positions):
        return logits.topk(30).indices[:, 29]

    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=2, max_num_batched_tokens=13, num_blocks=5,
                          device="cpu")  # fmt: skip
    params = [SamplingParams(max_tokens=3, logprobs=1), SamplingParams(max_tokens=2)]
    wanted = outputs(ModelRunner(config, model=one_layer(True), sampler=unlikely), config, params)
    assert len(set(wanted[0][0])) == 3
    ours = GpuRunner(config, model=one_layer(True), attention=TritonAttention(2), sampler=unlikely)
    replays = give_graphs(ours, config)
    assert outputs(ours, config, params) == wanted
    assert replays == [("MixedGraphs", 13), ("DecodeGraphs", 2), ("DecodeGraphs", 1)]


def test_a_sampler_of_your_own_is_not_asked_in_a_step_that_samples_nothing():
    """Chunks of prompts alone, as replays and launched one by one."""
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.worker.gpu_runner import GpuRunner

    def first(logits, seqs, positions):
        assert len(seqs) == len(logits) > 0
        return logits.argmax(-1)

    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=2, max_num_batched_tokens=4, num_blocks=5,
                          device="cpu")  # fmt: skip
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2)]
    wanted = outputs(ModelRunner(config, model=one_layer(True), sampler=first), config, params)
    for graphs in (False, True):
        ours = GpuRunner(config, model=one_layer(True), attention=TritonAttention(2), sampler=first)
        replays = give_graphs(ours, config) if graphs else []
        assert outputs(ours, config, params) == wanted and bool(replays) == graphs


class Sips(TokenBudgetScheduler):
    """A prompt gets 4 tokens a step: a row that samples may stand behind one that does not.

    It takes tokens back after they were scheduled, so it needs enable_prefix_caching=False.
    """

    def schedule(self):
        plan = super().schedule()
        for seq in plan.seqs:
            left = max(0, seq.num_scheduled_tokens - 4)
            seq.num_scheduled_tokens -= left
            plan.num_tokens -= left
        return plan


def test_a_row_that_samples_behind_one_that_does_not():
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.worker.gpu_runner import GpuRunner

    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=2, max_num_batched_tokens=13, num_blocks=5,
                          device="cpu", enable_prefix_caching=False)  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=1),
              SamplingParams(temperature=50, seed=3, max_tokens=3, logprobs=1)]  # fmt: skip
    wanted = outputs(ModelRunner(config, model=one_layer(True)), config, params, scheduler=Sips)
    ours = GpuRunner(config, model=one_layer(True), attention=TritonAttention(2))
    replays = give_graphs(ours, config)
    assert outputs(ours, config, params, scheduler=Sips) == wanted
    assert replays == [("MixedGraphs", 13)] * 3


def test_a_decoder_of_your_own_is_asked_and_gets_no_graph():
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.model.capabilities import declares
    from nanoengine.model.decoder import Decoder
    from nanoengine.worker.gpu_runner import GpuRunner

    class Backwards(Decoder):
        def logits(self, hidden):
            return super().logits(hidden).flip(-1)

    class Doubled(Decoder):
        def embed(self, input_ids):
            return super().embed(63 - input_ids)

    class Plain(Decoder):
        def compute_logits(self, hidden):  # knows no ``out``
            return -(hidden @ self.lm_head.weight.t())

    class Renamed(Decoder):
        pass

    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=2, num_blocks=5, device="cpu")
    params = [SamplingParams(temperature=0, max_tokens=1), SamplingParams(seed=3, max_tokens=1)]
    found = []
    for kind, own in ((Decoder, False), (Renamed, False), (Backwards, True), (Doubled, True), (Plain, True)):
        model = one_layer(True)
        model.__class__ = kind
        assert declares(model, "supports_cuda_graphs") != own
        wanted = outputs(ModelRunner(config, model=model), config, params)
        assert outputs(GpuRunner(config, model=model, attention=TritonAttention(2, 2)), config, params) == wanted
        found.append(wanted)
    assert found[0] == found[1] and all(found[0] != other for other in found[2:])


def test_layers_of_your_own_get_no_split_k_partials():
    """They may add what a layer hands on, which partials [S, T, hidden_size] would make nonsense of."""
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.model.decoder import Attention, Decoder, DecoderLayer, ForwardContext
    from nanoengine.worker.gpu_runner import GpuRunner

    class Adds(DecoderLayer):
        def forward(self, *given):
            hidden, residual = super().forward(*given)
            return hidden + residual, None

    class Rectified(Attention):
        def forward(self, *given):
            return super().forward(*given).relu()

    class Copies(Decoder):
        def layers_forward(self, hidden, positions, attention, caches, metadata):
            ctx = ForwardContext(positions, self.rotary_emb, attention, metadata, attention.reads_stored)
            residual = None
            for layer, ctx.kv_cache in zip(self.layers, caches, strict=True):
                hidden, residual = layer(hidden, residual, ctx)
                hidden, residual = hidden + residual, None
            return self.norm(hidden)[0]

    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=2, num_blocks=5, device="cpu")
    params = [SamplingParams(temperature=0, max_tokens=2), SamplingParams(seed=3, max_tokens=2)]
    left = {None: [], Adds: ["layers.0"], Rectified: ["layers.0.self_attn"], Copies: [""]}
    for kind in (None, Adds, Rectified, Copies):
        model = one_layer(True)
        for part in (model, model.layers[0], model.layers[0].self_attn):
            if kind is not None and type(part) in kind.__mro__:
                part.__class__ = kind
        wanted = outputs(ModelRunner(config, model=model), config, params)
        ours = GpuRunner(config, model=model, attention=TritonAttention(2, 2))
        assert (ours.fusion.split_k, ours.fusion.left) == (kind is None, left[kind])
        assert outputs(ours, config, params) == wanted


def test_block_tables_follow_growth_and_a_row_that_changes_hands():
    import torch

    from nanoengine.engine.batch import build_batch
    from nanoengine.engine.sequence import Sequence
    from nanoengine.worker.block_tables import BlockTables

    tables, written = BlockTables(4, 4, torch.device("cpu")), []
    write = tables._write
    tables._write = lambda updates: (written.append(updates), write(updates))
    a, b = (Sequence(i, [1] * 9, SamplingParams(), 20) for i in range(2))
    a.row, b.row, a.block_table, b.block_table = 3, 0, [7, 8], [1, 2]

    def shown(*seqs, new, **how):
        for seq in seqs:
            seq.num_scheduled_tokens = 1
        tables.update(build_batch(list(seqs), 4, new), **how)
        return [tables.tensor[seq.row, : len(seq.block_table)].tolist() for seq in seqs]

    assert shown(a, b, new=[True, True]) == [[7, 8], [1, 2]]
    assert shown(b, a, new=[False, False]) == [[1, 2], [7, 8]] and len(written) == 1
    a.block_table.append(9)
    shown(a, b, new=[False, False], written_by_step=np.array([2, 0]))
    assert len(written) == 1  # the step writes the 9 itself
    tables.tensor[3, 2] = 9
    a.block_table = [5]  # another sequence has the row, or a restarted one: it shares nothing with the old table
    assert shown(a, new=[True]) == [[5]]
    a.block_table.append(6)
    assert shown(a, new=[False]) == [[5, 6]]
