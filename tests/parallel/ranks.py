"""Ranks as threads of the test's own process: real collectives, no process to start."""

import threading

import torch
from torch.distributed import HashStore

from nanoengine.parallel.group import Group

CPU = torch.device("cpu")


def on_ranks(size, function, timeout=60):
    """[function(group) of each rank], called at the same time; the first error is raised."""
    store, results, errors = HashStore(), [None] * size, []

    def run(rank):
        try:
            group = Group(store, rank, size, CPU, "127.0.0.1")
            with torch.inference_mode():
                results[rank] = function(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
