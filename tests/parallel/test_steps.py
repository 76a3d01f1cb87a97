"""A batch at the other rank is the batch, in the same order, and no block id was sent twice."""

import dataclasses
import pickle
import random

import numpy as np

from nanoengine.config import EngineConfig
from nanoengine.engine.batch import Batch, build_batch
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.sequence import Sequence
from nanoengine.parallel.steps import StepReceiver, StepSender
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner
from tests.parallel.ranks import on_ranks

ARRAYS = [field.name for field in dataclasses.fields(Batch) if field.name not in ("seqs", "block_tables")]


def assert_same(found, batch):
    for name in ARRAYS:
        assert np.array_equal(getattr(found, name), getattr(batch, name)), name
    assert found.block_tables == batch.block_tables and len(found.seqs) == len(batch.seqs)


class Sending(SlotRunner):
    """Each batch goes through the wire form."""

    def __init__(self, *sizes, max_num_seqs):
        super().__init__(*sizes)
        self.sender, self.receiver = StepSender(), StepReceiver()

    def launch(self, batch):
        assert_same(self.receiver.unpack(pickle.loads(pickle.dumps(self.sender.pack(batch)))), batch)
        return super().launch(batch)


def test_through_admissions_growth_preemptions_and_overlap():
    """40 requests on a small pool: tables grow, are dropped in preemptions, and their lines taken by others."""
    draw = random.Random(0)
    for policy in ("token_budget", "prefill_first"):
        for overlap in (0, 1):
            runner = Sending(30, 4, 50, max_num_seqs=6)
            config = EngineConfig(vocab_size=50, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=100,
                                  policy=policy, overlap=overlap)  # fmt: skip
            engine = LLMEngine(config, runner=runner)
            for _ in range(40):
                prompt = [draw.randrange(50) for _ in range(draw.randint(1, 40))]
                engine.add_request(prompt, SamplingParams(max_tokens=draw.randint(1, 30)))
            for _ in engine.run():
                pass
            assert engine.scheduler.num_preemptions


def test_a_decode_step_sends_no_more_for_long_contexts():
    """And a table that grows is the same list there, which is how a GPU's block tables know it."""
    seqs = [Sequence(i, [1] * 5000, SamplingParams(), 10**4) for i in range(8)]
    for seq in seqs:
        seq.block_table, seq.row = list(range(313)), seq.seq_id
        seq.num_computed_tokens, seq.num_scheduled_tokens = 4999, 1
    sender, receiver, sizes, tables = StepSender(), StepReceiver(), [], set()
    for _ in range(40):
        data = pickle.dumps(sender.pack(build_batch(seqs, 16, [not sizes] * 8)))
        sizes.append(len(data))
        tables.add(tuple(map(id, receiver.unpack(pickle.loads(data)).block_tables)))
        for seq in seqs:
            seq.block_table += [400] * (seq.num_computed_tokens + 2 > 16 * len(seq.block_table))
            seq.token_ids.append(1)
            seq.num_tokens += 1
            seq.num_computed_tokens += 1
    assert max(sizes[1:]) < 2000 < sizes[0] and len(tables) == 1


def test_64_sequences_of_4096_tokens():
    """A megabyte is not enough for what this step is; it comes whole all the same."""
    seqs = [Sequence(i, [(i + j) % 1000 for j in range(4096)], SamplingParams(), 5000) for i in range(64)]
    for i, seq in enumerate(seqs):
        seq.block_table, seq.num_scheduled_tokens = list(range(256 * i, 256 * (i + 1))), 4096
    batch = build_batch(seqs, 16)

    def talk(group):
        if group.rank == 0:
            return group.send(StepSender().pack(batch))
        return StepReceiver().unpack(group.receive())

    _, *found = on_ranks(3, talk)
    assert len(pickle.dumps(StepSender().pack(batch))) > 2**22
    for other in found:
        assert_same(other, batch)
