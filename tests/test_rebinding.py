"""A notebook cell that makes an LLM can be run again: the old one is closed first, and only the old one."""

import json
import subprocess
import sys

import pytest

START = "from nanoengine import LLM\nsettings = dict(model='tiny-llama', load_format='dummy', device='cpu')"
MAKE = "llm = LLM(**settings)"
OVER_LINES = "import nanoengine\nx = 1\nllm = nanoengine.LLM(\n    **settings,\n)"
IN_A_FUNCTION = "def make():\n    llm = LLM(**settings)\n    return llm\nnew = make()"
REFUSED = "try:\n    llm = LLM(**settings, block_size=0)\nexcept ValueError:\n    pass"

CASES = {  # cells that are run one after another, and whether the first LLM is closed then
    "run again": ([MAKE, "first = [llm]", MAKE], True),
    "over several lines": ([MAKE, "first = [llm]", OVER_LINES], True),
    "IPython's own _2 holds it too": ([MAKE, "llm", "first = [_]", MAKE], True),
    "another name holds it": ([MAKE, "first = [llm]; other = llm", MAKE], False),
    "another name gets the new one": ([MAKE, "first = [llm]", "second = LLM(**settings)"], False),
    "a local name": ([MAKE, "first = [llm]", IN_A_FUNCTION], False),
    "no plain assignment": ([MAKE, "first = [llm]", "llm = [LLM(**settings)][0]"], False),
    "settings that are refused": ([MAKE, "first = [llm]", REFUSED], False),
}
PROGRAM = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell, closed = InteractiveShell.instance(), {}
for name, cells in json.load(sys.stdin).items():
    shell.reset(new_session=True)
    for cell in cells:
        shell.run_cell(cell, store_history=True).raise_error()
    closed[name] = shell.user_ns["first"][0].engine is None
    assert shell.user_ns["llm"].generate([[1, 2]], use_tqdm=False)[0].token_ids  # what the name holds now works
print(json.dumps(closed))
"""


@pytest.fixture(scope="module")
def closed() -> dict[str, bool]:
    cells = json.dumps({name: [START, *cells] for name, (cells, _) in CASES.items()})
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=cells, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_only_what_the_line_replaces_is_closed(case, closed):
    assert closed[case] is CASES[case][1]
