"""The picture in README is what the engine player draws today. `python -m tests.test_readme_picture` draws it anew."""

from __future__ import annotations

from pathlib import Path

from nanoengine.course.example import example_engine
from nanoengine.trace import record
from nanoengine.viz import render, snapshot

PICTURE = Path(__file__).parents[1] / "lessons" / "images" / "engine_player.svg"
STEP = 3  # the pool is full: D has to give way


def drawn() -> str:
    engine = example_engine()
    with record(engine) as trace:
        for _ in engine.run():
            pass
    return render(snapshot(trace, STEP), "en", theme="light", selected="A") + "\n"


def test_the_picture_in_the_readme_is_up_to_date():
    assert PICTURE.read_text(encoding="utf-8") == drawn()
    assert "lessons/images/engine_player.svg" in (PICTURE.parents[2] / "README.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
