"""Put on PYTHONPATH, this cuts a Python process and its children off from the network.

Loopback and Unix sockets stay, for a Jupyter kernel talks to its client over them.
"""

import ipaddress
import socket


class NetworkBlocked(OSError):
    """Something tried to leave this machine in a test that must work offline."""


def _is_local(host):
    if host in ("", "localhost", b"localhost", None):
        return True
    try:
        return ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host).is_loopback
    except ValueError:
        return False


def _checked(method):
    def call(self, *args):
        address = args[-1]  # connect(address), sendto(data, [flags,] address)
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            raise NetworkBlocked(f"no network in this test, but something asked for {address}")
        return method(self, *args)

    return call


def _resolve(host, *args, **kwargs):
    if not _is_local(host):
        raise NetworkBlocked(f"no network in this test, but something looked up {host!r}")
    return _getaddrinfo(host, *args, **kwargs)


_getaddrinfo = socket.getaddrinfo
socket.getaddrinfo = _resolve
for _name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, _name, _checked(getattr(socket.socket, _name)))
