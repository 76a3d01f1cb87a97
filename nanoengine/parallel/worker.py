"""The other ranks: build the same runner, then do every step that rank 0 sends.

``main`` is for parallel.watch.LocalRanks, which starts a process for it, writes a pickled Job to its stdin and reads
lines of JSON, [kind, text], from its stdout: "hello", then nothing unless it fails ("error", or "lost" if another
rank did).
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from dataclasses import dataclass

from nanoengine.config import EngineConfig
from nanoengine.loader.resolve import ModelFiles

ALL_LISTEN = "all listen"  # key that rank 0 sets once every rank has said hello


@dataclass(frozen=True)
class Job:
    """One rank of one engine. config.device is this rank's own; host, port: where the ranks find each other."""

    config: EngineConfig
    files: ModelFiles
    rank: int
    host: str
    port: int


def serve(config: EngineConfig, files: ModelFiles, group) -> None:
    """This rank's part of an engine, from loading the weights until rank 0 closes it.

    The runner is the same class as on rank 0, but only its ``run`` is called: nothing is sampled here.
    """
    from nanoengine.parallel.decoder import load_part
    from nanoengine.parallel.leader import facts
    from nanoengine.parallel.steps import StepReceiver
    from nanoengine.worker.model_runner import runner_type

    model = load_part(files, config, group)
    runner, steps = runner_type(config.device)(config, model=model, group=group), StepReceiver()
    group.gather_numbers(facts(runner))
    while (message := group.receive()) is not None:
        runner.run(steps.unpack(message))
    runner.close()


def main() -> None:
    control = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the lines
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to every process of a terminal or service: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()

    def tell(kind: str, text: str = "") -> None:
        print("\n" + json.dumps([kind, text]), file=control, flush=True)  # what others printed may have no end of line

    from nanoengine.parallel.group import FOR_EVER, Group, PeerLost
    from nanoengine.parallel.leader import prepare

    try:
        job: Job = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
        import torch
        from torch.distributed import TCPStore

        prepare(job.config.device, job.config.tensor_parallel_size)
        tell("hello")
        store = TCPStore(job.host, job.port, is_master=False)
        store.wait([ALL_LISTEN], FOR_EVER)  # how long the others take to start depends on the machine
        group = Group(store, job.rank, job.config.tensor_parallel_size, torch.device(job.config.device), job.host)
        serve(job.config, job.files, group)
    except PeerLost:
        tell("lost", traceback.format_exc())
        os._exit(1)
    except BaseException:
        tell("error", traceback.format_exc())
        os._exit(1)
    os._exit(0)  # at once, here and above: threads of gloo and NCCL may wait for ranks that will not come


def _end_with_parent(parent: int) -> None:
    """The parent never writes again: when its end of the pipe closes, it has gone. A fork of it may hold the
    pipe open, so look at the parent's id, too."""
    if os.name == "nt":
        sys.stdin.buffer.read()
    else:
        while not select.select([sys.stdin.fileno()], [], [], 1.0)[0] and os.getppid() == parent:
            pass
    os._exit(1)
