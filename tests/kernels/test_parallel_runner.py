"""The GPU's runner on two ranks, decode steps as graphs have them, but for the recording: all of it without a GPU."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kernels.decode_inputs import decode_inputs, decode_inputs_reference
from nanoengine.model.layers import ParallelLMHead

PROMPTS = [[5, 9, 20, 7, 8, 31, 2, 47, 4, 50], [11, 62]]
MIXES = [
    [SamplingParams(temperature=0, max_tokens=3), SamplingParams(temperature=50, seed=3, max_tokens=5)],
    [SamplingParams(seed=5, max_tokens=2, min_tokens=1), SamplingParams(logprobs=2, seed=1, max_tokens=3)],
]  # fmt: skip


def outputs(runner, config):
    found = []
    for params in MIXES:
        engine = LLMEngine(config, runner=runner)
        seqs = [engine.add_request(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
        for _ in engine.run():
            pass
        found.append([(seq.output_ids, seq.logprobs and [sorted(entry) for entry in seq.logprobs]) for seq in seqs])
    return found


def test_two_ranks_with_overlap_and_the_step_that_graphs_record():
    if torch.cuda.is_available():
        return  # no interpreter then; tests/gpu/test_parallel.py does it for real
    from nanoengine.parallel.group import Group
    from nanoengine.parallel.leader import LeadingGpuRunner
    from nanoengine.parallel.watch import Ranks
    from nanoengine.worker.gpu_runner import GpuRunner
    from tests.kernels.second_rank import CONFIG, ONE, make

    wanted = outputs(make(GpuRunner, None)[0], ONE)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    second = subprocess.Popen([sys.executable, "-m", "tests.kernels.second_rank", str(store.port)],
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    ranks = Ranks()
    try:
        assert second.stdout.readline() == "hello\n"
        ranks.group = Group(store, 0, 2, torch.device("cpu"), "127.0.0.1")
        runner, replays = make(LeadingGpuRunner, ranks.group, ranks=ranks, ranks_here=1)
        assert outputs(runner, CONFIG) == wanted
        assert not runner.fusion.split_k  # the ranks would send four times as much
        assert set(replays) == {("DecodeGraphs", 1), ("DecodeGraphs", 2), ("MixedGraphs", 8)}
        row = runner.model.embed_tokens.weight.data[20]  # the head's row, too: everyone's logits hold NaN
        row.fill_(float("nan"))
        assert [ids for ids, _ in sum(outputs(runner, CONFIG), [])] == [[]] * 4
        ranks.group.send(None)
        assert second.wait(30) == 0
    finally:
        if ranks.group is not None:
            ranks.group.close()
        second.kill()
        second.wait()
        second.stdout.close()


@pytest.mark.parametrize(("vocabulary", "ranks"), [(64, 2), (63, 2), (1, 2), (5, 4), (3, 8)])
@pytest.mark.parametrize("given", [True, False])
def test_logits_of_parts_that_end_in_padding(vocabulary, ranks, given):
    """The last ranks may have fewer tokens than the others, or none."""
    rows = -(-vocabulary // ranks)
    whole = torch.randn(3, vocabulary)
    parts = torch.nn.functional.pad(whole, (0, ranks * rows - vocabulary), value=torch.nan).view(3, ranks, rows)
    weight = torch.nn.Parameter(torch.zeros(rows, 8))
    head = ParallelLMHead(weight, vocabulary, SimpleNamespace(gather=lambda x: parts.transpose(0, 1)))
    out = torch.full((3, vocabulary), torch.nan) if given else None
    with torch.inference_mode():
        found = head(torch.zeros(3, 8), out)
    assert torch.equal(found, whole) and (out is None or found is out)


def test_a_part_of_the_vocabulary(device):
    embedding = torch.randn(10, 48, device=device)
    ids, none = torch.tensor([3, 14, 15, 4, 0, 99], device=device), torch.full((6,), -1, device=device)
    zeros, tables = torch.zeros_like(ids), torch.zeros(1, 4, dtype=torch.int32, device=device)
    arguments = (ids, none, zeros, zeros, none, zeros, tables, embedding, 16, 5)
    x = decode_inputs(*arguments)
    assert torch.equal(x, decode_inputs_reference(*arguments))
    wanted = torch.zeros(6, 48, device=device)
    wanted[1] = embedding[9]
    assert torch.equal(x, wanted)
