"""Rank 0's runner: the same as for one rank, but each step is first told to the others.

It lives in the caller's process, with scheduler, block manager and sampler; the others only run batches.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass

import torch

from nanoengine.config import EngineConfig
from nanoengine.engine.batch import Batch
from nanoengine.loader.resolve import ModelFiles
from nanoengine.parallel.decoder import load_part
from nanoengine.parallel.group import Group
from nanoengine.parallel.steps import StepSender
from nanoengine.parallel.watch import Ranks
from nanoengine.worker.gpu_runner import GpuRunner
from nanoengine.worker.model_runner import ModelRunner

POLL_S = 5e-5


@dataclass(frozen=True)
class RankFacts:
    """pid: its process. weight_bytes, kv_bytes: what it holds. loaded_bytes: what it took from the checkpoint."""

    pid: int
    weight_bytes: int
    loaded_bytes: int
    kv_bytes: int


def prepare(device: str, ranks_here: int) -> None:
    """Make ``device`` the current one; CPU ranks share the cores."""
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))
    else:
        torch.cuda.set_device(device)


class Threads:
    """torch's number of threads in a process that leads engines: given back when the last of them ends.

    They may end in another order than they began, so that none of them can know what to give back.
    """

    def __init__(self) -> None:
        self._lock, self._engines, self._before = threading.RLock(), set(), 0

    def share(self, engine: object, device: str, ranks_here: int) -> None:
        with self._lock:
            if self._engines:
                torch.set_num_threads(self._before)
            self._before = torch.get_num_threads()
            self._engines.add(engine)
            prepare(device, ranks_here)

    def give_back(self, engine: object) -> None:
        with self._lock:
            if engine in self._engines:
                self._engines.remove(engine)
                if not self._engines:
                    torch.set_num_threads(self._before)


THREADS = Threads()


def _forgotten(ranks: Ranks) -> None:
    ranks.forget()
    THREADS.give_back(ranks)


def facts(runner: ModelRunner) -> list[int]:
    weights = sum(parameter.nbytes for parameter in runner.model.parameters())
    return [os.getpid(), weights, runner.model.loaded_bytes, runner.kv_cache.nbytes]


class Leader:
    """Mixed into a runner. ranks: what is known of the others; facts: RankFacts of each rank, by rank.

    Errors: RuntimeError with a rank's own traceback, or its signal, if one fails; then the engine is over.
    """

    def __init__(self, config: EngineConfig, *, model: ModelFiles, group: Group, ranks: Ranks, ranks_here: int,
                 **parts):  # fmt: skip
        self.ranks, self._sender = ranks, StepSender()
        THREADS.share(ranks, config.device, ranks_here)
        try:
            with ranks.guard():
                super().__init__(config, model=load_part(model, config, group), group=group, **parts)
                self.facts = [RankFacts(*row) for row in group.gather_numbers(facts(self))]
        except BaseException:
            self._drop()
            THREADS.give_back(ranks)
            raise
        weakref.finalize(self, _forgotten, ranks)  # if nobody calls close()

    @property
    def failure(self) -> str | None:
        """Why no step can be done any more, None while all is well."""
        return self.ranks.failure

    def launch(self, batch: Batch):
        self.ranks.check()
        return super().launch(batch)

    def run(self, batch: Batch, *options):
        with self.ranks.guard():
            self.group.send(self._sender.pack(batch))
            return super().run(batch, *options)

    def wait(self, event: torch.cuda.Event) -> None:
        """As event.synchronize(), which would wait for ever for a GPU whose partner is gone."""
        with self.ranks.guard():
            while not event.query():
                self.ranks.check()
                time.sleep(POLL_S)

    def close(self) -> None:
        self.ranks.stop(lambda: self.group.send(None))
        super().close()
        if not self.ranks.is_fork:
            self.group.close()
        THREADS.give_back(self.ranks)


class LeadingRunner(Leader, ModelRunner):
    pass


class LeadingGpuRunner(Leader, GpuRunner):
    pass
