"""`nanoengine serve` as an operator may mistype it, and what doctor says of it."""

import pytest

from nanoengine.cli import main
from nanoengine.doctor import CHECKS, examine, serving
from nanoengine.server.commands import KEY_VARIABLE
from nanoengine.server.run import listen

TINY = ["serve", "--model", "tiny-llama", "--load-format", "dummy"]


@pytest.fixture(autouse=True)
def never_served(monkeypatch):
    """A check that lets something through shall not serve for ever."""
    monkeypatch.setattr("nanoengine.server.run.serve", lambda *_, **__: pytest.fail("it was served"))


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--port", "80000"], "--port must lie in [0, 65535]"), (["--grace", "nan"], "--grace"),
     (["--request-timeout", "inf"], "--request-timeout"), (["--max-waiting", "-1"], "--max-waiting"),
     (["--trace-steps", "99999"], "--trace-steps"), (["--max-body-bytes", "1"], "--max-body-bytes"),
     (["--host", "999.1.1.1"], "choose another --host"), (["--host", "a..b"], "choose another --host"),
     (["--host", ""], "--host"), (["--api-key", ""], "--api-key"), (["--api-key", " "], "--api-key"),
     (["--api-key", "k\n"], "--api-key"), (["--served-model-name", " "], "--served-model-name"),
     (["--keep-alive", "0"], "--keep-alive"), (["--cors-origin", "example.org"], "--cors-origin"),
     (["--cors-origin", "https://a.org/page"], "--cors-origin"), (["--cors-origin", ""], "--cors-origin"),
     (["--cors-origin", "https://a.org:x"], "--cors-origin"), (["--cors-origin", "*.a.org"], "--cors-origin"),
     (["--cors-origin", "https://*.a.org"], "--cors-origin"), (["--cors-origin", "https://a b"], "--cors-origin")],
)  # fmt: skip
def test_what_cannot_be_served_is_one_line(options, said, capsys):
    assert main([*TINY, *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_name_with_bytes_that_are_no_text_is_one_that_json_can_hold(monkeypatch):
    found = []
    monkeypatch.setattr("nanoengine.server.run.serve", lambda app, *_, **__: found.append(app.state.service))
    assert main([*TINY, "--port", "0", "--served-model-name", "caf\udce9\n"]) == 0
    assert found[0].model_card()["id"] == r"caf\xe9\n"


@pytest.mark.parametrize("key", ["", " ", "a\tb", "k "])
def test_a_key_that_nobody_can_send_is_no_open_door(key, monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, key)
    assert main(TINY) == 2
    error = capsys.readouterr().err
    assert KEY_VARIABLE in error
    assert f"'{key}'" not in error  # it may be half of a secret


def test_a_model_that_is_not_there_leaves_no_server_behind(tmp_path, capsys):
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2  # taken: said before a model is loaded
        assert f"127.0.0.1:{port}" in capsys.readouterr().err
    assert main(["serve", "--model", str(tmp_path / "none"), "--port", str(port)]) == 2
    assert "no such folder or file" in capsys.readouterr().err
    listen("127.0.0.1", port).close()


def test_a_port_is_taken_from_the_first_moment():
    with listen("127.0.0.1", 0) as first:
        with pytest.raises(OSError, match="choose another --port"):
            listen("127.0.0.1", first.getsockname()[1])


def _check():
    return next(examine([entry for entry in CHECKS if entry[0] == "serve"]))


def test_doctor_says_whether_a_server_can_run(monkeypatch):
    with listen("127.0.0.1", 0) as sock:
        monkeypatch.setattr(serving, "PORT", sock.getsockname()[1])
        taken = _check()
        assert (taken.status, taken.needed) == ("ok", False)
        assert "Address already in use" in taken.detail
        assert "--port 0" in taken.fix
    free = _check()
    assert (free.status, free.fix) == ("ok", "")
    assert f"http://127.0.0.1:{serving.PORT}/v1" in free.detail


def test_doctor_says_what_to_type_for_a_server(monkeypatch):
    def version_of(name):
        if name != "fastapi":
            raise ModuleNotFoundError(name)
        return "0.1"

    monkeypatch.setattr(serving, "version_of", version_of)
    missing = _check()
    assert missing.status == "missing"
    for word in ("pip install", "uvicorn>=", "prometheus-client>=", "fastapi>="):
        assert word in missing.fix
    monkeypatch.setattr(serving, "version_of", lambda name: "0.1")
    assert _check().status == "problem"


def test_a_trace_that_is_not_there_is_named_with_what_writes_one(capsys):
    assert main(["trace", "view", "no-such.jsonl", "--no-open"]) == 2
    said = capsys.readouterr().err
    assert "there is no file no-such.jsonl" in said and "trace.save" in said
