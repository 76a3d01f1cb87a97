"""Named inputs survive the trip through one packed copy, padded or not."""

import dataclasses

import numpy as np
import pytest
import torch

from nanoengine import SamplingParams
from nanoengine.attention.paged import Bucket, PagedMetadata, common_metadata
from nanoengine.engine.batch import build_batch
from nanoengine.engine.sequence import Sequence
from nanoengine.packing import pack, views
from nanoengine.worker.inputs import StepInputs
from nanoengine.worker.sampling_arrays import SamplingArrays

CPU = torch.device("cpu")


def batch_and_sampling():
    """A chunk that samples nothing, a row whose token is in flight, a finished prompt at temperature 0."""
    seqs = []
    for i, (tokens, computed, count) in enumerate(
        [([1, 2, 3, 4, 5], 0, 3), ([7, 8], 2, 1), ([9], 0, 1)]
    ):
        seq = Sequence(
            i, tokens, SamplingParams(temperature=0.0 if i == 2 else 0.1 * (i + 1), seed=-i), 20
        )
        seq.row, seq.num_computed_tokens, seq.num_scheduled_tokens, seq.block_table = (
            5 - i,
            computed,
            count,
            [i, i + 9],
        )
        seqs.append(seq)
    seqs[1].num_tokens = 3
    batch = build_batch(seqs, 2, [True, False, True])
    return batch, SamplingArrays.of([seqs[1], seqs[2]])


def values(record) -> dict:
    return {
        field.name: getattr(record, field.name).tolist()
        for field in dataclasses.fields(record)
        if hasattr(getattr(record, field.name), "tolist")
    }


@pytest.mark.parametrize("bucket", [None, Bucket(8, 4), Bucket(5, 3)])
def test_every_array_arrives_under_its_name(bucket):
    batch, sampling = batch_and_sampling()
    inputs = StepInputs.of(
        batch, sampling, PagedMetadata(**common_metadata(batch, bucket)), bucket, padding_row=99
    )
    there = inputs.to(CPU)
    assert values(there) == values(inputs) and values(there.attention) == values(inputs.attention)
    assert there.temperatures.dtype == torch.float64 and there.input_ids.dtype == torch.int64
    assert values(there)["temperatures"][:2] == [0.2, 0.0], "exact: they travel as float64"


def test_what_the_arrays_say():
    batch, sampling = batch_and_sampling()
    inputs = StepInputs.of(batch, sampling)
    assert inputs.token_rows.tolist() == [-1, -1, -1, 4, -1]
    assert inputs.logits_indices.tolist() == [3, 4] and inputs.sample_request_rows.tolist() == [
        4,
        3,
    ]
    assert inputs.sample_positions.tolist() == [3, 1]
    wide = StepInputs.of(batch, sampling, None, Bucket(8, 4), padding_row=99)
    assert wide.sample_request_rows.tolist() == [4, 3, 99, 99] and wide.token_rows.tolist()[5:] == [
        -1,
        -1,
        -1,
    ]


def test_a_later_step_of_the_bucket_lies_where_the_one_before_lay():
    """Views of the bucket's words, made once, show each step that is written there: what a CUDA graph relies on."""
    bucket = Bucket(8, 4)
    batch, sampling = batch_and_sampling()
    full = StepInputs.of(
        batch, sampling, PagedMetadata(**common_metadata(batch, bucket)), bucket, padding_row=99
    )
    words = torch.zeros_like(pack(full, CPU))
    given = views(words, full)
    assert set(values(given)["input_ids"]) == {0}
    words.copy_(pack(full, CPU))
    assert values(given) == values(full) and values(given.attention) == values(full.attention)


def test_two_dimensions_and_odd_sizes_are_kept():
    @dataclasses.dataclass
    class Record:
        odd: np.ndarray
        table: np.ndarray
        none: np.ndarray
        label: str = "kept"

    record = Record(np.arange(3), np.arange(6).reshape(2, 3), np.empty((2, 0), np.int64))
    there = views(pack(record, CPU), record)
    assert (
        there.table.tolist() == [[0, 1, 2], [3, 4, 5]]
        and there.none.shape == (2, 0)
        and there.label == "kept"
    )
    assert there.table.storage_offset() % 2 == 0, "16 bytes"
