"""What a machine and its user do beside the engine: prints, forks, files with unlucky names, a rank that is stopped."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from tests.parallel.test_failures import SHORT, gone, pids, tiny

HERE = os.getcwd()


def test_sitecustomize_prints_and_the_folder_has_a_random_py(tmp_path):
    """What Python finds and prints there when it starts was once a rank that failed, and a rank that never listened."""
    site, folder = tmp_path / "site", tmp_path / "folder"
    site.mkdir(), folder.mkdir()
    (site / "sitecustomize.py").write_text("print('half a line', end='', flush=True)")
    (folder / "random.py").write_text("raise SystemExit('not the random that you want')")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {HERE!r})\n"
        "from tests.parallel.test_failures import SHORT, tiny\n"
        "with tiny() as llm: print(llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].token_ids)\n"
    )
    result = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=60,
                            env=os.environ | {"PYTHONPATH": str(site)})  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("half a line[") and "half a line" in result.stderr


def test_two_engines_closed_in_the_order_of_their_making_and_a_fork():
    """All sockets are this machine's own, threads come back, and a fork that ends takes nothing with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        with tiny() as first, tiny() as second:
            assert torch.get_num_threads() == 4
            listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
            assert len(listening) >= 2 and set(listening) == {"127.0.0.1"}
            if (fork := os.fork()) == 0:
                try:
                    with pytest.raises(RuntimeError, match=f"ranks listen to process {os.getppid()}, of which this"):
                        first.generate([[1, 2, 3]], SHORT, use_tqdm=False)
                    second.close()
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
            for llm in (first, second):
                assert len(llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].token_ids) == 3
            ranks = pids(first) + pids(second)
            first.close()
        assert torch.get_num_threads() == 8 and gone(*ranks)
    finally:
        torch.set_num_threads(before)


STOPPED = """
import os, signal, sys, threading
from nanoengine.parallel import watch
from tests.parallel.test_failures import ENDLESS, pids, tiny
llm = tiny()
watch.FIRST_WORD_S = 1
[rank] = pids(llm)
print(rank, flush=True)
threading.Timer(0.3, os.kill, (rank, signal.SIGSTOP)).start()
llm.generate([[1, 2, 3]], ENDLESS, use_tqdm=False)
"""


@pytest.mark.parametrize("how", ["Ctrl-C", "kill"])
def test_a_rank_that_is_stopped_is_named_and_neither_the_call_nor_the_rank_stays(how):
    parent = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, start_new_session=True)  # fmt: skip
    try:
        rank = int(parent.stdout.readline())
        said = parent.stderr.readline()
        assert f"rank 1 (process {rank}) is stopped (`kill -CONT {rank}` lets it go on)" in said
        if how == "kill":
            parent.kill()
        else:
            parent.send_signal(signal.SIGINT)  # heard, but the step comes first
            with pytest.raises(subprocess.TimeoutExpired):
                parent.wait(2)
            parent.send_signal(signal.SIGINT)
        assert parent.wait(20) < 0
        assert gone(rank)
        assert ("KeyboardInterrupt" in parent.stderr.read()) == (how == "Ctrl-C")
    finally:
        parent.kill()
        parent.communicate()
