"""Every kernel compiles for every generation of GPUs that is spoken of; none of them need be there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compile_all import HOPPER, before_waiting

KERNELS = set("_add_norm _best_of_row _best_of_tile _combine_pieces _decode_inputs _decode_pieces _gemv _prefill_tiles "
              "_product _rope_store _store_kv _swiglu".split())  # fmt: skip


@pytest.mark.parametrize("architecture", [75, 80, 90])
def test_kernels_compile(architecture):
    """75 is a T4, which has no bfloat16; 80 an A100; 90 an H100 or H200."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", "tests.kernels.compile_all", str(architecture)], env=surroundings,
                         cwd=Path(__file__).parents[2], capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert set(run.stdout.split()) == KERNELS - (set() if architecture == 90 else HOPPER)


def test_the_list_of_kernels_is_whole():
    sources = [file.read_text() for file in (Path(__file__).parents[2] / "nanoengine/kernels").glob("*.py")]
    launched = [name for source in sources for name in re.findall(r"^ +(_\w+)\[[^\n]*\]\(", source, re.M)]
    assert set(launched) == KERNELS


def test_what_stands_before_the_wait_is_found():
    ptx = """.entry kernel(
    @%p1 bra $L__BB0_2;
    prefetch.global.L2 [%rd1]; // on one way only
$L__BB0_2:
    griddepcontrol.wait; // dummy
    st.global.b32 [%rd2], %r1;
    ret;"""
    assert {"bra", "prefetch.global.L2", "griddepcontrol.wait"} <= before_waiting(ptx)
    assert not before_waiting(ptx) & {"st.global.b32", "ret"}
    assert "ret" in before_waiting(ptx.replace("    griddepcontrol.wait; // dummy\n", ""))
