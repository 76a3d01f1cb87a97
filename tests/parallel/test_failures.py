"""A rank that fails, is killed, or loses its parent: a clear error soon, and no process left."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from nanoengine import LLM, SamplingParams

SETTINGS = dict(load_format="dummy", device="cpu", max_model_len=2000, num_blocks=600)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)


def tiny(size=2, **more):
    return LLM("tiny-llama", tensor_parallel_size=size, **SETTINGS | more)


def pids(llm):
    return [fact.pid for fact in llm.engine.runner.facts[1:]]


def gone(*numbers, seconds=10):
    end = time.monotonic() + seconds
    while any(psutil.pid_exists(n) and psutil.Process(n).status() != "zombie" for n in numbers):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_kill_9_in_the_middle_of_a_call_and_a_new_engine_afterwards():
    with tiny(size=4) as llm:
        ranks = pids(llm)
        threading.Timer(0.5, os.kill, (ranks[1], signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"rank 2 \(process {ranks[1]}\) was killed by SIGKILL.*\n.*4 ranks"):
            llm.generate([[1, 2, 3]], ENDLESS, use_tqdm=False)
        assert time.monotonic() - began < 30
        assert gone(*ranks)
        with pytest.raises(RuntimeError, match="rank 2 .*SIGKILL"):
            llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
    with tiny() as llm:
        assert len(llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].token_ids) == 3
        ranks = pids(llm)
    assert gone(*ranks)


def test_an_error_on_a_rank_comes_with_its_own_traceback():
    """Rank 1 is told of a slot that does not exist, and fails deep in its forward pass while rank 0 waits in a sum."""
    with tiny() as llm:
        sender, ranks = llm.engine.runner._sender, pids(llm)
        honest = sender.pack

        def pack(batch):
            message = honest(batch)
            message.batch.slot_mapping = message.batch.slot_mapping + 10**6
            return message

        sender.pack = pack
        with pytest.raises(RuntimeError) as caught:
            llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
        text = str(caught.value)
        assert f"rank 1 (process {ranks[0]}) failed:\nTraceback" in text
        assert "torch_attention.py" in text and "IndexError" in text and "make a new one" in text
    assert gone(*ranks)


def test_an_error_after_the_forward_pass_is_rank_0s_own_and_the_engine_goes_on():
    calls = []

    def sampler(logits, seqs, positions):
        calls.append(len(seqs))
        if len(calls) == 2:
            raise ZeroDivisionError("mine")
        return logits.argmax(-1)

    with tiny(sampler=sampler) as llm:
        with pytest.raises(ZeroDivisionError, match="mine"):
            llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
        again = llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].token_ids
        llm.engine.runner.forward = None  # an error of rank 0 within what all do together: this is the end
        with pytest.raises(TypeError):
            llm.generate([[4, 5, 6]], SHORT, use_tqdm=False)
        with pytest.raises(RuntimeError, match="rank 0 broke off within a step .TypeError"):
            llm.generate([[4, 5, 6]], SHORT, use_tqdm=False)
    assert len(again) == 3


def test_ranks_that_cannot_start_are_an_error_and_leave_nothing(tmp_path, monkeypatch):
    code = "import os, sys\nif 'parallel' in str(sys.orig_argv): os._exit(7)"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = set(psutil.Process().children())
    with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) ended with exit code 7"):
        tiny()
    assert set(psutil.Process().children()) <= before


PARENT = """
import os, signal, sys, threading
from tests.parallel.test_failures import ENDLESS, SHORT, pids, tiny
llm = tiny()
print(*pids(llm), flush=True)
if sys.argv[1] == "fork" and os.fork() == 0:
    signal.pause()  # holds copies of all pipes
if sys.argv[1] == "leave":
    sys.exit()
if sys.argv[1] == "interrupt":
    group = lambda: os.killpg(0, signal.SIGINT)  # what Ctrl-C in a terminal does
    threading.Timer(0.5, group).start()
    try:
        llm.generate([[1, 2, 3]], ENDLESS, use_tqdm=False)
    except KeyboardInterrupt:
        print(len(llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].token_ids), flush=True)
    llm.close()
else:
    llm.generate([[1, 2, 3]] * 2, ENDLESS, use_tqdm=False)
"""


@pytest.mark.parametrize("how", ["kill", "fork", "leave", "interrupt"])
def test_no_rank_outlives_its_parent(how):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True,
                              start_new_session=True)  # fmt: skip
    try:
        rank = int(parent.stdout.readline())
        if how in ("kill", "fork"):
            time.sleep(0.3)
            parent.kill()
        if how == "interrupt":
            assert parent.stdout.readline() == "3\n", "Ctrl-C ends the call, not the ranks"
        code = parent.wait(30)
        assert code == (-signal.SIGKILL if how in ("kill", "fork") else 0)
        assert gone(rank)
    finally:
        try:
            os.killpg(parent.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        parent.wait()
        parent.stdout.close()


TORCHRUN = """
import os, sys
from nanoengine import LLM, SamplingParams
from tests.parallel.test_failures import SETTINGS, SHORT
for number in range(2):
    with LLM("tiny-llama", tensor_parallel_size=2, **SETTINGS) as llm:
        print("rank", os.environ["RANK"], llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].token_ids, flush=True)
        if sys.argv[1] == "break" and number:
            llm.engine.runner.group.send("what rank 1 does not understand")
            llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
print("the end of", os.environ["RANK"], flush=True)
"""


@pytest.mark.parametrize("how", ["well", "break"])
def test_torchrun(how, tmp_path):
    """Two engines in turn; only rank 0 runs the script. A failing rank's traceback is in rank 0's error."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120,
                            env=os.environ | {"PYTHONPATH": os.getcwd()})  # fmt: skip
    with LLM("tiny-llama", **SETTINGS) as llm:
        tokens = llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].token_ids
    lines = [f"rank 0 {tokens}"] * 2
    if how == "well":
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines() == [*lines, "the end of 0"]
    else:
        assert result.returncode and result.stdout.splitlines() == lines
        assert "RuntimeError: rank 1 failed:\nTraceback" in result.stderr


def test_in_a_notebook():
    """No __main__ that could be imported; the kernel's end is the ranks' end."""
    import nbformat
    from nbclient import NotebookClient

    cells = ["from tests.parallel.test_failures import SETTINGS, SHORT, pids", "from nanoengine import LLM",
             "llm = LLM('tiny-llama', tensor_parallel_size=2, **SETTINGS)",
             "print(*pids(llm), *llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].token_ids)"]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("\n".join(cells))])
    here = {"metadata": {"path": os.getcwd()}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=here).execute()
    rank, *ids = map(int, notebook.cells[0].outputs[-1]["text"].split())
    assert len(ids) == 3 and gone(rank)
