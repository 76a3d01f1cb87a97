"""Clients that leave, stall or send rubbish: their blocks come back, and the server goes on."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import pytest

from nanoengine.server import run
from nanoengine.server.app import Settings
from nanoengine.server.output_stream import Generation
from nanoengine.sim import expected_output
from tests.server.conftest import VOCAB, aborted, ask, events, hold, make_engine, running, until

LONG = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 400}


def connect(server, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    sock.sendall(data)
    return sock


def post(body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other side closes: an answer may arrive in several pieces."""
    answer = b""
    while piece := sock.recv(4000):
        answer += piece
    return answer


def assert_works(server) -> None:
    with server.client() as client:
        assert ask(client, prompt=[5], max_tokens=3).json()["usage"]["completion_tokens"] == 3
        assert client.get("/health").is_success


@pytest.mark.parametrize("abrupt", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks_before_the_next_step(slots, stream, abrupt, monkeypatch):
    heard, abort = threading.Event(), Generation.abort
    monkeypatch.setattr(Generation, "abort", lambda generation: (abort(generation), heard.set()))
    manager, runner = slots.engine.block_manager, slots.engine.runner
    runner.delay = 0.02
    sock = connect(slots, post(LONG | {"stream": stream}))
    until(lambda: slots.stats.steps >= 3)
    with connect(slots, post(LONG | {"prompt": [9] * 5, "stream": True})):  # it keeps the engine busy
        until(lambda: runner.launches[-1] == [0, 1])
        hold(runner)
        if abrupt:  # a reset, as the system sends it for a process that was killed with data unread
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        assert heard.wait(20)
        in_flight = len(runner.launches)
        held, launch = [], runner.launch  # blocks that neither are free nor belong to who runs

        def watched(batch):
            held.append(manager.num_blocks - manager.num_free_blocks - sum(len(seq.block_table) for seq in batch.seqs))
            return launch(batch)

        monkeypatch.setattr(runner, "launch", watched)
        runner.gate.set()
        until(lambda: len(held) > 3)
        assert {tuple(ids) for ids in runner.launches[in_flight:]} == {(1,)}  # not one step more with it
        assert set(held) == {0}
        with slots.client() as client:
            assert aborted(client) == {"0": 1}
    until(lambda: slots.is_idle)
    with slots.client() as client:
        until(lambda: aborted(client) == {"0": 2})
        metrics = client.get("/metrics").text
    assert 'nanoengine_requests_total{reason="abort"} 2.0' in metrics
    assert "nanoengine_requests_refused_total{" not in metrics  # it was not the server that ended it
    assert_works(slots)


def test_a_client_that_leaves_with_a_request_behind_is_heard(slots):
    """uvicorn would read no more after the second request came, and so not hear of the end."""
    slots.engine.runner.delay = 0.01
    sock = connect(slots, post(LONG))  # no stream: nothing is written before the end
    until(lambda: slots.stats.running == 1)
    sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    steps = slots.stats.steps
    until(lambda: slots.stats.steps > steps + 3)
    sock.close()
    with slots.client() as client:
        until(lambda: aborted(client) == {"0": 1})


def test_a_flood_behind_a_request_is_cut(slots):
    slots.engine.runner.delay = 0.01
    with connect(slots, post(LONG)) as sock:
        until(lambda: slots.stats.running == 1)
        with pytest.raises(OSError):
            for _ in range(200):
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
                time.sleep(0.01)
    until(lambda: slots.is_idle)
    assert_works(slots)


def test_requests_sent_ahead_are_answered_in_order(slots):
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    asked = b"".join(post({"model": "tiny", "prompt": [i], "max_tokens": i}) for i in (3, 1, 2))
    with connect(slots, asked + last) as sock:
        answer = read_all(sock)
    found = re.findall(rb'"completion_tokens":(\d)|"status":"(ok)"', answer)
    assert [number or status for number, status in found] == [b"3", b"1", b"2", b"ok"]


def test_half_open_connections_are_cut(slots, monkeypatch):
    monkeypatch.setattr(run, "HEADER_TIMEOUT_S", 0.3)
    silent, half = connect(slots), connect(slots, b"POST /v1/completions HTTP/1.1\r\nHost:")
    second = connect(slots, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while b'{"status":"ok"}' not in answer:
        piece = second.recv(1000)
        assert piece, answer
        answer += piece
    second.sendall(b"GET /hea")  # half of a second request
    drip = connect(slots, b"G")
    began = time.monotonic()
    with pytest.raises(OSError):  # a byte now and then does not set the clock back
        while time.monotonic() - began < 10:
            drip.sendall(b"X")
            time.sleep(0.05)
    for sock in (silent, half, second, drip):
        with sock:
            with suppress(ConnectionResetError):
                assert sock.recv(1000) == b""
    assert time.monotonic() - began < Settings.keep_alive_s - 2  # they were cut, not let go as idle ones
    assert_works(slots)


@pytest.mark.parametrize("settings", [{}, {"api_key": "k"}])
def test_who_reads_only_after_sending_everything_still_gets_the_answer(settings):
    """A connection closed while the client sends is reset, and its system would throw the answer away."""
    with running(make_engine(), max_body_bytes=1000, **settings) as server:
        with connect(server) as sock:
            sock.sendall(post({"model": "tiny", "prompt": "a" * 3_000_000}))
            time.sleep(0.3)  # what arrives after a reset is lost
            answer = read_all(sock)
        assert b" 413 " in answer.split(b"\r\n")[0] or (settings and b" 401 " in answer.split(b"\r\n")[0])
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]


def test_a_body_that_never_comes_is_a_408():
    with running(make_engine(), body_timeout_s=0.2) as server:
        with connect(server, post(LONG)[:-5]) as sock:
            answer = read_all(sock)
        assert b"408" in answer.split(b"\r\n")[0]
        assert b'"code":"request_timeout"' in answer
        assert_works(server)


def test_a_reader_that_stops_reading_is_cut_and_holds_nothing():
    engine = make_engine(max_model_len=20_000, num_blocks=6000)
    with running(engine, request_timeout_s=1.0) as server:
        body = LONG | {"prompt": [[7]] * 8, "max_tokens": 19_000, "stream": True}
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # or the system would keep megabytes
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        began = time.monotonic()
        sock.sendall(post(body))
        until(lambda: server.stats.steps > 3)
        with server.client() as client:  # others are served meanwhile
            until(lambda: ask(client, prompt=[5], max_tokens=3).is_success)  # 1 s may be short on a busy machine
        until(lambda: server.is_idle)
        until(lambda: not server.server.server_state.connections)
        assert time.monotonic() - began < Settings.keep_alive_s - 2  # it was cut, not let go as an idle one
        sock.close()
        assert_works(server)


HTTP = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("data", [b"\x00" * 500, b"GET\r\n\r\n", b"\x16\x03\x01" * 100,
                                  b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"b" * 200_000,
                                  b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                                  HTTP + b"Content-Length: -5\r\n\r\n", HTTP + b"Content-Length: 5x\r\n\r\nabcde",
                                  HTTP + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
                                  HTTP + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
                                  HTTP + b"Transfer-Encoding: gzip\r\n\r\nxyz\r\n",
                                  HTTP + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
                                  b"GET / HTTP/1.1\r\n\r\n"])  # fmt: skip
def test_what_is_not_http_gets_a_400_or_the_door(slots, data, caplog):
    answer = b""
    with connect(slots) as sock:
        with suppress(ConnectionError):
            sock.sendall(data)
            answer = read_all(sock)
    if answer:
        assert re.match(rb"HTTP/1.1 (400|501) ", answer)
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert_works(slots)


def test_forty_streams_at_once_are_all_right():
    engine = make_engine(max_num_seqs=16, num_blocks=64)
    prompts = [[i, i + 1] for i in range(40)]
    found = {}
    with running(engine) as server:
        alone = {}
        with server.client() as client:
            for i, prompt in enumerate(prompts):
                alone[i] = ask(client, prompt=prompt, max_tokens=20).json()["choices"][0]["text"]

        def read(i: int) -> None:
            with server.client() as client:
                body = {"model": "tiny", "prompt": prompts[i], "max_tokens": 20, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    found[i] = "".join(event["choices"][0]["text"] for event in events(response))

        threads = [threading.Thread(target=read, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.is_idle
        assert server.stats.preemptions == engine.scheduler.num_preemptions
    assert found == alone
    assert len(set(alone.values())) > 30
    assert len(expected_output(prompts[0], 20, VOCAB)) == 20


def test_shutdown_ends_streams_with_an_event():
    engine = make_engine()
    engine.runner.delay = 0.01
    with running(engine, grace_s=0.2) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            until(lambda: server.stats.steps > 3)
            server.server.should_exit = True
            found = events(response)
        assert found[-1]["error"]["code"] == "shutting_down"
        server.thread.join(30)
        assert not server.thread.is_alive()
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks


def test_sigterm_under_load_in_a_process_of_its_own():
    process = subprocess.Popen(
        [sys.executable, "-m", "nanoengine", "serve", "--model", "tiny-llama", "--load-format", "dummy", "--port", "0",
         "--grace", "0.3", "--log-level", "warning", "--max-model-len", "2048"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        url = process.stderr.readline().split(" on ")[1].strip()
        body = {"model": "tiny-llama", "prompt": "a", "max_tokens": 2000, "stream": True}
        until(lambda: _answers(url), 60)
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            rest = [line for line in lines if line]
        assert "shutting_down" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(20) == 0
        assert time.monotonic() - began < 0.3 + run.CLEAN_UP_S + 10  # ten for the end of Python on a busy machine
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/models").is_success
    except httpx.TransportError:
        return False
