"""The ranks of one engine, and all that they ever say to each other.

Tensors go over NCCL between GPUs and over gloo between CPUs; what Python objects the ranks exchange goes
over gloo, so that no GPU is asked to wait for it.

``torch.distributed.init_process_group`` makes *the* group of a process. A process that holds two engines,
or a notebook that uses torch.distributed itself, needs more than one, so each engine makes its own here.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

TIMEOUT = timedelta(minutes=30)  # for a rank that lives, but does not come (loading a large model takes a while)
CONNECT_HERE = timedelta(seconds=25)  # for ranks of one machine that are known to be there
FOR_EVER = timedelta(days=3650)  # an engine may have nothing to do
SLICE = timedelta(seconds=1)  # so long rank 0 waits at a time: Python hears Ctrl-C only in between
HEADER = 8  # bytes that say how long a message is
FIRST_PIECE = 2**15  # bytes of it that travel along with them: most messages are shorter


class PeerLost(RuntimeError):
    """A collective failed, most likely because another rank has ended; parallel.watch finds out why."""


class Group:
    """Rank ``rank`` of ``size``. All ranks make the same calls in the same order.

    store: where the ranks find each other. device: where this rank computes. hostname: the address to
    listen on; None leaves it to gloo (GLOO_SOCKET_IFNAME chooses the network interface).
    while_waiting: if set, called with the seconds that a CPU's collective has taken so far, each second.
    Errors: PeerLost from every call but abort and close.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, hostname: str | None = None):
        self.rank, self.size, self.device = rank, size, device
        self._nccl = None
        self.while_waiting: Callable[[float], None] | None = None
        with _peers():
            self._cpu = _gloo(PrefixStore("cpu", store), rank, size, hostname)
            self._tensors = self._cpu
            if device.type == "cuda":
                self._tensors, self._nccl = _nccl(PrefixStore("cuda", store), rank, size)

    # tensors

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` added up over the ranks, in place."""
        with _peers():
            self._wait(dist.all_reduce(x, group=self._tensors, async_op=self._waits))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """[size, *x.shape] on rank 0, None on the others."""
        whole = x.new_empty(self.size, *x.shape) if self.rank == 0 else None
        with _peers():
            rows = None if whole is None else list(whole)
            self._wait(dist.gather(x.contiguous(), rows, group_dst=0, group=self._tensors, async_op=self._waits))
        return whole

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``x``, written over the others'."""
        with _peers():
            self._wait(dist.broadcast(x, group_src=0, group=self._tensors, async_op=self._waits))
        return x

    # numbers and objects

    def all_reduce_min(self, number: int) -> int:
        x = torch.tensor([number], device="cpu")
        with _peers():
            self._wait(dist.all_reduce(x, op=dist.ReduceOp.MIN, group=self._cpu, async_op=True))
        return int(x)

    def gather_numbers(self, numbers: list[int]) -> list[list[int]] | None:
        """Each rank's numbers, by rank, on rank 0."""
        x = torch.tensor(numbers, device="cpu")
        rows = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with _peers():
            self._wait(dist.gather(x, rows, group_dst=0, group=self._cpu, async_op=True))
        return None if rows is None else [row.tolist() for row in rows]

    def send(self, message: Any) -> None:
        """Rank 0 tells all others something, of any length."""
        data = pickle.dumps(message, protocol=5)
        first = bytearray(HEADER + FIRST_PIECE)
        first[:HEADER] = len(data).to_bytes(HEADER, "little")
        first[HEADER : HEADER + min(len(data), FIRST_PIECE)] = data[:FIRST_PIECE]
        self._broadcast(first, TIMEOUT)
        if len(data) > FIRST_PIECE:
            self._broadcast(bytearray(data[FIRST_PIECE:]), TIMEOUT)

    def receive(self) -> Any:
        """What rank 0 sends next. Waits for it for as long as it takes."""
        first = bytearray(HEADER + FIRST_PIECE)
        self._broadcast(first, FOR_EVER)
        length = int.from_bytes(first[:HEADER], "little")
        data = first[HEADER : HEADER + length]
        if length > FIRST_PIECE:
            rest = bytearray(length - FIRST_PIECE)
            self._broadcast(rest, TIMEOUT)
            data += rest
        return pickle.loads(data)

    def _broadcast(self, data: bytearray, timeout: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
        with _peers():
            self._wait(self._cpu.broadcast([torch.frombuffer(data, dtype=torch.uint8)], options))

    @property
    def _waits(self) -> bool:
        """True where a collective of tensors is waited for here. On a GPU it is queued, and the queue waits."""
        return self._tensors is self._cpu

    def _wait(self, work: dist.Work | None) -> None:
        if work is None:
            return
        if self.rank:
            work.wait()
            return
        waited = 0.0
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                if work.is_completed():  # with an error of its own, or well and just now
                    work.wait()
                    return
            waited += SLICE.total_seconds()
            if self.while_waiting is not None:
                self.while_waiting(waited)

    # the end

    def abort(self) -> None:
        """Let a GPU that waits for a lost rank go. May be called from any thread."""
        backend, self._nccl = self._nccl, None
        if backend is not None:
            backend.abort()

    def close(self) -> None:
        """Hang up. The others may still be there or not: nothing is waited for."""
        self.abort()
        self._cpu = self._tensors = None


@contextmanager
def _peers():
    try:
        yield
    except RuntimeError as error:  # torch.distributed's own errors are its subclasses
        raise PeerLost(str(error)) from error


def _gloo(store: Store, rank: int, size: int, hostname: str | None) -> ProcessGroup:
    group = ProcessGroup(store, rank, size)
    if hostname is None:
        backend = ProcessGroupGloo(store, rank, size, timeout=TIMEOUT)
    else:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=hostname)], CONNECT_HERE
        backend = ProcessGroupGloo(store, rank, size, options)
        backend.set_timeout(TIMEOUT)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return group


def _nccl(store: Store, rank: int, size: int):
    from torch.distributed import ProcessGroupNCCL

    group, options = ProcessGroup(store, rank, size), ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    # By default a watchdog ends the whole process when a collective fails, and this one may be the user's
    # notebook. Here parallel.watch looks after the ranks. Both settings are read by the constructor.
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        backend = ProcessGroupNCCL(store, rank, size, options)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
    return group, backend


@contextmanager
def _environment(**variables: str):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
