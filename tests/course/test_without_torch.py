"""The course's own modules run where torch and jupytext are not there; a reader waits for neither."""

import subprocess
import sys

CODE = """
import sys
sys.modules["torch"] = sys.modules["jupytext"] = None  # an import of either raises now
from nanoengine.course import ask, cards, hunt, interview, quiz, recall, show
for make in (quiz.quiz, recall.recall, hunt.hunt, cards.cards):
    assert make("01").bundles()
assert interview.interview().bundles() and ask.ask("what is a block table?").found
assert show.show("nanoengine/worker/model_runner.py:ModelRunner.launch").rows
"""


def test_every_form_works_without_torch_and_jupytext():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
