"""Program run apart with `-I -S -c`; imports nothing of ours."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from fcntl import ioctl

_NS_GET_USERNS = 0xB701
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_IP_FREEBIND = 15
_LONGEST = 64


def serve(asked: socket.socket) -> None:
    """Answer requests until Kiwi is gone: each is an address, with a network and a socket for the answer."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are waited for by the system
    while True:
        said, given, _, _ = socket.recv_fds(asked, _LONGEST, 2)
        if not said:
            return
        if len(given) == 2 and os.fork() == 0:  # noqa: PLR2004 - the network and the way back
            _answer(said.decode(), *given)
        for descriptor in given:
            os.close(descriptor)


def _answer(address: str, network: int, back: int) -> None:
    """Send back the socket, or the words for why there is none; this process ends here."""
    host, _, port = address.rpartition(":")
    with socket.socket(fileno=back) as reply:
        try:
            # The network belongs to the first user namespace of the sandbox; its processes may be in one below by now.
            _enter(ioctl(network, _NS_GET_USERNS), _CLONE_NEWUSER)
            _enter(network, _CLONE_NEWNET)
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            # The launcher may not have brought up the loopback interface yet, without which there is no such address.
            listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
            listener.bind((host, int(port)))
            listener.listen(128)
            socket.send_fds(reply, [b"done"], [listener.fileno()])
        except (OSError, ValueError) as fault:
            reply.send(str(fault).encode()[:_LONGEST])
    os._exit(0)


def _enter(namespace: int, kind: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
