"""Who starts whom: ``LLM(tensor_parallel_size=k)`` starts k - 1 processes, or torchrun has started all k before.

Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and WORLD_SIZE is k) every rank runs the
same script. Rank 0 goes on with it; on the others LLM(...) does not return: it serves rank 0's engines, one after
the other, and ends its process with exit code 0 when rank 0's ends.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import pickle
import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous

from nanoengine.config import EngineConfig
from nanoengine.loader.resolve import ModelFiles, resolve_model
from nanoengine.model.decoder import Decoder
from nanoengine.parallel.group import FOR_EVER, TIMEOUT, Group
from nanoengine.parallel.leader import LeadingGpuRunner, LeadingRunner, prepare
from nanoengine.parallel.split import check_split
from nanoengine.parallel.watch import LocalRanks, Ranks, TorchrunRanks, report_failure
from nanoengine.parallel.worker import ALL_LISTEN, Job, serve
from nanoengine.worker.device import pick_device

log = logging.getLogger(__name__)

HERE = "127.0.0.1"
THE_END = b"end"  # in the place of a job
LAST_WORDS_S = 3.0
ALONE_S = 10.0  # after so long without the others a process says that it believes to be under torchrun
VARIABLES = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


def make_leader(config: EngineConfig, *, model=None, load_format: str = "auto", sampler=None, attention=None):
    """Rank 0's runner of ``config.tensor_parallel_size`` ranks, the others running; see worker.model_runner.

    Errors: ValueError for a model, a machine or parts that so many ranks cannot share; RuntimeError with its
    traceback if a rank fails. Then no process is left.
    """
    size = config.tensor_parallel_size
    if attention is not None or isinstance(model, Decoder):
        what = "an attention backend" if attention is not None else "a decoder"
        raise ValueError(f"tensor_parallel_size={size}: {what} of your own lives in one process; use 1 rank with it")
    files = model if isinstance(model, ModelFiles) else resolve_model(model, load_format=load_format)
    check_split(files.config, size)
    lead = _lead_under_torchrun if under_torchrun(size) else _lead_here
    return lead(config, files, sampler)


def _lead_here(config: EngineConfig, files: ModelFiles, sampler):
    size = config.tensor_parallel_size
    configs = [dataclasses.replace(config, device=device_of(config.device, rank, size)) for rank in range(size)]
    store = _store_here()
    ranks = LocalRanks()
    try:
        ranks.start([Job(configs[rank], files, rank, HERE, store.port) for rank in range(1, size)])
        ranks.wait_until_they_listen()
        store.set(ALL_LISTEN, "yes")
        return _lead(configs[0], files, sampler, store, ranks, HERE, size)
    except BaseException:
        ranks.stop()
        raise


def _store_here() -> TCPStore:
    """At a free port, for this machine alone: by itself a TCPStore listens on every address, and lets everyone in.

    Errors: OSError where a machine cannot reach itself; torch.distributed would try for half an hour.
    """
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        try:
            with socket.create_connection((HERE, port), 5), server.accept()[0]:
                pass
        except OSError as error:
            raise OSError(f"the ranks of one machine talk over {HERE}, which cannot be reached ({error}): is its "
                          "loopback interface up? `ip link set lo up`") from None  # fmt: skip
        return TCPStore(HERE, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT,
                        master_listen_fd=server.detach())  # fmt: skip


def _lead(config: EngineConfig, files, sampler, store: Store, ranks: Ranks, hostname, ranks_here: int):
    with ranks.guard():
        device = torch.device(config.device)
        ranks.connected(Group(store, 0, config.tensor_parallel_size, device, hostname))
    kind = LeadingRunner if device.type == "cpu" else LeadingGpuRunner
    return kind(config, model=files, sampler=sampler, group=ranks.group, ranks=ranks, ranks_here=ranks_here)


def device_of(name: str, local_rank: int, ranks_here: int) -> str:
    """The device of a machine's local_rank-th rank. Errors: ValueError if it has fewer GPUs than ranks."""
    first = pick_device(name)
    if first.type == "cpu":
        return "cpu"
    start, there = first.index or 0, torch.cuda.device_count()
    if start + ranks_here > there:
        raise ValueError(
            f"{ranks_here} ranks from device={name!r} on need {ranks_here} GPUs, and this machine has {there}: lower "
            "tensor_parallel_size, or use device='cpu'"
        )
    return f"cuda:{start + local_rank}"


# torchrun


def under_torchrun(size: int) -> bool:
    """True if this process is one of ``size`` that torchrun started. ValueError if it started another number."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return False
    try:
        started = int(os.environ["WORLD_SIZE"])
    except ValueError:
        raise ValueError(f"WORLD_SIZE={os.environ['WORLD_SIZE']!r} is not a number: if no torchrun has started this "
                         f"process, unset {VARIABLES}") from None  # fmt: skip
    if started not in (1, size):
        raise ValueError(
            f"tensor_parallel_size={size}, but torchrun has started WORLD_SIZE={started} processes: they must be equal"
        )
    return started > 1


def _lead_under_torchrun(config: EngineConfig, files: ModelFiles, sampler):
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = lambda config: dataclasses.replace(config, device=device_of(config.device, local_rank, ranks_here))  # noqa: E731
    with _told_if_alone():
        store = _torchrun_store()
    if rank:
        _serve_engines(store, rank, own, ranks_here)
        raise SystemExit(0)
    number = store.add("engines", 1)
    ranks = TorchrunRanks(_of(store, number), config.tensor_parallel_size)
    store.set(f"job {number}", pickle.dumps((config, files)))
    try:
        with _told_if_alone():
            return _lead(own(config), files, sampler, _of(store, number), ranks, None, ranks_here)
    except BaseException:
        ranks.stop()
        raise


@contextmanager
def _told_if_alone():
    """Such variables may be another tool's, and then nobody comes; the wait is torch.distributed's, and silent."""
    text = (f"rank {os.environ['RANK']} waits for the {os.environ['WORLD_SIZE']} ranks of torchrun at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, or for their model; if no torchrun has started "
            f"this process, end it and unset {VARIABLES}")  # fmt: skip
    timer = threading.Timer(ALONE_S, log.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _serve_engines(store: Store, rank: int, own, ranks_here: int) -> None:
    """One engine of rank 0's after the other, until its process ends."""
    number = 1
    while (data := _wait_for(store, f"job {number}")) != THE_END:
        config, files = pickle.loads(data)
        config = own(config)
        if files.folder is not None and not files.folder.exists():
            raise FileNotFoundError(f"rank {rank}: {files.folder} is not on this machine; every host needs the model "
                                    "at the same path")  # fmt: skip
        prepare(config.device, ranks_here)
        group = Group(_of(store, number), rank, config.tensor_parallel_size, torch.device(config.device))
        try:
            serve(config, files, group)
        except BaseException as error:
            report_failure(_of(store, number), rank, error)
            group.close()  # which rank 0 notices
            time.sleep(LAST_WORDS_S)  # torchrun ends all processes when this one ends: let rank 0 speak first
            raise
        group.close()
        number += 1


def _wait_for(store: Store, key: str) -> bytes:
    store.wait([key], FOR_EVER)
    return store.get(key)


def _of(store: Store, number: int) -> Store:
    return PrefixStore(f"engine {number}", store)


@cache
def _torchrun_store() -> Store:
    """One a process: where RANK and so on are set by hand, rank 0 keeps it, at a port that must not change."""
    found, rank, _ = next(rendezvous("env://", timeout=timedelta(minutes=5)))
    store = PrefixStore("nanoengine", found)
    if rank == 0:
        atexit.register(lambda: store.set(f"job {int(store.add('engines', 0)) + 1}", THE_END))
    return store
