"""The cut-off from the network that test_notebooks relies on does cut, and leaves loopback alone."""

import os
import subprocess
import sys
from pathlib import Path

OFFLINE = Path(__file__).with_name("offline")
LOCAL = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
print("ok")
"""


def _run(code: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(OFFLINE)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


def test_a_name_is_not_looked_up():
    assert "NetworkBlocked" in _run("import urllib.request as r; r.urlopen('http://example.com')").stderr


def test_an_address_is_not_connected_to():
    assert "NetworkBlocked" in _run("import socket; socket.create_connection(('192.0.2.1', 80))").stderr


def test_a_datagram_is_not_sent():
    code = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 9))"
    assert "NetworkBlocked" in _run(code).stderr


def test_a_child_process_is_cut_off_too():
    code = "import subprocess as s, sys; s.run([sys.executable, '-c', 'import socket as n; n.getaddrinfo(chr(97), 1)'])"
    assert "NetworkBlocked" in _run(code).stderr


def test_loopback_works():
    assert _run(LOCAL).stdout == "ok\n"
