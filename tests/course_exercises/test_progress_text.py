"""Where the progress file is looked for, and what is said of one that cannot be kept."""

from pathlib import Path

import pytest

from nanoengine.course import progress


def test_a_home_of_nobody_stops_no_check(monkeypatch):
    monkeypatch.setenv("NANOENGINE_PROGRESS", "~no-such-user/progress.json")
    assert progress.find() == Path("~no-such-user/progress.json")


@pytest.mark.parametrize("text", ['{"schema": 99}', "{", "[]", '{"schema": 1, "cards": []}'])
def test_in_chinese_why_it_is_not_kept_is_chinese(tmp_path, text, monkeypatch):
    path = tmp_path / progress.NAME
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(progress.os, "rename", lambda *_: (_ for _ in ()).throw(OSError(13, "Permission denied")))
    said = progress.note("quiz", "01", {}, path=path).said("zh")
    assert str(path) in said and "进度没有保存" in said
    for english in ("damaged", "written by", "restore", "delete", "renamed", "no progress", "cannot"):
        assert english not in said.replace(str(path), "")
