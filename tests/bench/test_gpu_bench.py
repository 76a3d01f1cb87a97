"""What of the GPU's benchmarks can be checked without one: workload, roofline, the ladder's schedulers, messages."""

import pytest

from nanoengine.bench.gpu import fresh, nano_vllm_workload, show
from nanoengine.bench.ladder import ClosedBatches, Naive, rungs, workloads
from nanoengine.bench.roofline import decode_seconds, find_card, workload_seconds
from nanoengine.cli import main
from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim.slot_runner import SlotRunner, expected_output

QWEN = NAMED_CONFIGS["qwen3-0.6b"]


def test_the_workload_is_nano_vllms():
    workload = nano_vllm_workload()
    assert (len(workload.prompts), workload.num_input_tokens, workload.num_output_tokens) == (256, 142827, 133966)
    again = fresh(workload, 1)
    assert list(map(len, again.prompts)) == list(map(len, workload.prompts)) and again.prompts != workload.prompts


def test_the_roofline_of_an_h200():
    card = find_card("NVIDIA H200")
    assert find_card("NVIDIA A100-SXM4-80GB").name == "A100" and find_card("Some Other Card") is None
    for rows, context, milliseconds in ((1, 128, 0.25), (64, 512, 1.04), (256, 1024, 6.57), (64, 4096, 6.53)):
        assert 1e3 * decode_seconds(QWEN, card, [context] * rows) == pytest.approx(milliseconds, rel=0.02)
    workload = nano_vllm_workload()
    assert workload.num_output_tokens / workload_seconds(QWEN, card, workload) == pytest.approx(38800, rel=0.02)


@pytest.mark.parametrize("scheduler", [Naive, ClosedBatches])
def test_the_ladders_schedulers_give_the_same_tokens(scheduler):
    config = EngineConfig(max_num_seqs=2, max_model_len=40, enable_prefix_caching=False, overlap=0)
    engine = LLMEngine(config, runner=SlotRunner(8, 16), scheduler=scheduler)
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]
    seqs = [engine.add_request(p, SamplingParams(max_tokens=3 + i)) for i, p in enumerate(prompts)]
    computed, together = [], []
    for out in engine.run():
        computed.append(out.num_prefill_tokens + out.num_decode_tokens)
        together.append({seq.seq_id for seq in out.seqs})
    assert [seq.output_ids for seq in seqs] == [expected_output(p, 3 + i) for i, p in enumerate(prompts)]
    if scheduler is Naive:
        assert computed[:3] == [23, 25, 27]  # all tokens, every step
    else:
        assert {0, 2} not in together and {1, 2} not in together  # 2 waits for both, though 0 ends first


def test_rungs_name_workloads_and_settings_that_exist():
    names = EngineConfig.names()
    for _, workload, settings in rungs():
        assert workload in workloads()
        assert all(name in names or name == "scheduler" for name in settings)
    assert [name for name, *_ in rungs()][-3:] == ["CUDA graphs", "overlap", "fused kernels"]


@pytest.mark.parametrize("kind", ["latency", "arrivals", "ladder"])
def test_without_a_gpu_the_command_says_so(kind, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", kind]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_a_result_is_shown_with_its_ceiling():
    text = show({"machine": "one H200", "date": "2026-01-01", "model": "m", "workload": "w", "output_tok_s": 25000.0,
                 "runs_tok_s": [25000.0], "first_token_s": 9.5,
                 "ceiling": dict(card="H200", bandwidth=4.8e12, output_tok_s=39000.0, percent=64.1)})  # fmt: skip
    assert "25,000.0 output tok/s" in text and "39,000" in text and "64.1 %" in text


@pytest.mark.parametrize("block_size", [16, 256])
def test_the_scenes_of_bench_attention(block_size):
    """Lengths as in the workload after so many steps; every block belongs to one row, and all keys have theirs."""
    pytest.importorskip("triton", reason="triton is not installed")
    from nanoengine.bench.attention import STEPS, scene_of

    work = nano_vllm_workload()
    for steps in STEPS[::3]:
        scene = scene_of(list(map(len, work.prompts)), steps, work.output_lens, block_size)
        left = [len(p) + steps for p, n in zip(work.prompts, work.output_lens, strict=True) if n > steps]
        assert scene.contexts.tolist() == left
        rows = zip(scene.tables, left, strict=True)
        used = [int(block) for line, n in rows for block in line[: -(-n // block_size)]]
        assert len(set(used)) == len(used) and max(used) < scene.num_blocks
    few = scene_of([17, 40], 0, None, block_size)
    assert few.contexts.tolist() == [17, 40] and few.name == "2 x 28"


def test_the_table_of_bench_attention_marks_the_best():
    pytest.importorskip("triton", reason="triton is not installed")
    from nanoengine.bench.attention import show

    def row(tile, spare, rates):
        scenes = {name: {"us": 1.0, "tb_s": rate} for name, rate in zip(("1 x 400", "256 x 658"), rates, strict=True)}
        return {"tile": tile, "warps": 2, "stages": 3, "spare_pieces": spare, "scenes": scenes}

    text = show({"machine": "m", "date": "d", "model": "x", "bandwidth": 4.8e12,
                 "rows": [row(32, None, (0.3, 4.2)), row(64, 128, (0.25, 4.4))]})  # fmt: skip
    assert "TB/s, of 4.8" in text and "0.30*" in text and "4.20 " in text and "4.40*" in text and "own" in text


def test_bench_attention_says_what_is_missing(capsys):
    import torch

    if not torch.cuda.is_available():
        assert main(["bench", "attention", "--tile", "32", "64"]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err
