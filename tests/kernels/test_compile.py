"""Every kernel compiles for every generation of GPUs that is spoken of; none of them need be there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine.kernels.contract import KERNELS, contract_of, contract_of_function
from tests.kernels.compile_all import before_waiting

FOLDER = Path(__file__).parents[2] / "nanoengine" / "kernels"


@pytest.mark.parametrize("architecture", [75, 80, 90])
def test_kernels_compile(architecture):
    """75 is a T4, which has no bfloat16; 80 an A100; 90 an H100 or H200."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", "tests.kernels.compile_all", str(architecture)], env=surroundings,
                         cwd=Path(__file__).parents[2], capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    contracts = contract_of_function()
    wanted = {name for name in contracts if architecture == 90 or not contracts[name].hopper}
    assert set(run.stdout.split()) == wanted


def launched(source: str) -> set[str]:
    return set(re.findall(r"^ +(_\w+)\[[^\n]*\]\(", source, re.M))


def test_every_file_with_a_kernel_is_in_the_list():
    files = {file.stem for file in FOLDER.glob("*.py") if launched(file.read_text())}
    assert files == set(KERNELS) and len(KERNELS) == len(files)


@pytest.mark.parametrize("name", KERNELS)
def test_a_contract_speaks_of_all_that_its_file_launches(name):
    """Each launcher has a reference, and each early read is an argument of its Triton function."""
    contract, module = contract_of(name), sys.modules[f"nanoengine.kernels.{name}"]
    assert launched((FOLDER / f"{name}.py").read_text()) == set(contract.early_reads)
    for function, arguments in contract.early_reads.items():
        assert set(arguments) <= set(getattr(module, function).arg_names)
    for launcher, reference in contract.references.items():
        assert getattr(module, launcher.__name__) is launcher
        assert reference.__name__ == f"{launcher.__name__}_reference"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_kernels_know_nothing_of_what_calls_them(file):
    imported = re.findall(r"^ *from nanoengine\.(\w+(?:\.protocols)?)", file.read_text(), re.M)
    assert set(imported) <= {"kernels", "engine.protocols"}  # the codes of a row without a token


def test_contracts_need_no_triton_until_they_are_asked_for():
    code = "import sys; import nanoengine.kernels.contract, nanoengine.kernels.gumbel_noise; "
    code += "assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parents[1], check=True)


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
