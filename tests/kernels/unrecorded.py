"""CUDA graphs without a GPU: nothing is recorded, each replay runs the step itself."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

from nanoengine.worker.cuda_graphs import Graphs, record_graphs


def _run_each_time(graphs, *before) -> tuple:
    for bucket in reversed(graphs.buckets):
        with torch.inference_mode():
            graphs._pad(bucket)
            graphs._step(bucket)
        graphs._graphs[bucket] = SimpleNamespace(replay=lambda bucket=bucket: graphs._step(bucket))
    return before


def give_graphs(runner, config) -> list[tuple[str, int]]:
    """Make the runner's steps replays. Returns a list to which each adds its (kind, bucket)."""
    with patch.object(Graphs, "record", _run_each_time):
        runner.graphs = record_graphs(runner, config)
    seen = []
    for graphs in runner.graphs:
        kind, replay = type(graphs).__name__, graphs.replay

        def noted(bucket, *rest, kind=kind, replay=replay):
            seen.append((kind, bucket.tokens))
            return replay(bucket, *rest)

        graphs.replay = noted
    return seen
