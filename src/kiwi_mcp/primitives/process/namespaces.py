"""Owner map for root; a listening socket inside a sandbox's network."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import select
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock

from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import PROXY, StartGate
from kiwi_mcp.primitives.process import namespace_helper
from kiwi_mcp.primitives.process.process_tree import TreeMarker, settle, stamping
from kiwi_mcp.primitives.process.spawn import abandon

PATIENCE = 20.0
"""How long the socket may take to be made, in seconds."""
_LARGEST_REPORT = 4_096
_lock = Lock()
_helpers: dict[int, _Helper] = {}
_PATIENCE = 5.0
_UNSHARE = ("/usr/bin/unshare", "--user", "/bin/cat")


async def listen_inside(gate: StartGate) -> socket.socket:
    """Return the socket on which a sandbox finds its proxy; the process in it has not begun yet."""
    # Until the launcher reports, the process may still be queued. The run has its own time limit.
    await _readable(gate.child_info)
    try:
        async with asyncio.timeout(PATIENCE):
            with ExitStack() as keep:
                process = await _first_process(gate.child_info)
                network = os.open(f"/proc/{process}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                keep.callback(os.close, network)
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                keep.enter_context(ours)
                with theirs:
                    _ask(network, theirs.fileno())
                await _readable(ours.fileno())
                return _received(ours)
    except (OSError, ValueError) as fault:  # a time limit that ended is among them
        raise IsolationUnavailable(
            f"The sandbox got no way to the network: {str(fault) or 'it took too long'}. The tool was not run.",
            suggestion="Try again; if it stays, look whether a container or a security module restricts namespaces.",
        ) from fault


class _Helper:
    """The process that makes sockets, and the way to ask it."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)  # a helper that no longer reads is treated as gone
        with theirs:
            number = theirs.fileno()
            # Its text and not its path: the user that Kiwi has become may not be able to read the one that holds it.
            text = Path(namespace_helper.__file__).read_text(encoding="utf-8")
            argv = (sys.executable, "-I", "-S", "-c", text, str(number))
            # With a mark of its own it is never taken for what some run left behind.
            with stamping(TreeMarker.new()):
                self._process = Popen(
                    argv,
                    cwd="/",
                    env={},
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    pass_fds=(number,),
                    start_new_session=True,
                )

    def ask(self, network: int, back: int) -> None:
        """Have a socket made in a network; it comes back through the other end of `back`."""
        socket.send_fds(self._ours, [f"{PROXY[0]}:{PROXY[1]}".encode()], [network, back])

    def end(self) -> None:
        """End the process."""
        self._ours.close()
        abandon(self._process)


def _ask(network: int, back: int) -> None:
    with _lock:
        if (helper := _helpers.get(os.getpid())) is not None:
            try:
                return helper.ask(network, back)
            except OSError:  # it is gone
                _helpers.pop(os.getpid()).end()
        # By this process's own number: one that was forked from another has no part in the other's helper.
        _helpers[os.getpid()] = _Helper()
        return _helpers[os.getpid()].ask(network, back)


@atexit.register
def _end() -> None:
    if (helper := _helpers.pop(os.getpid(), None)) is not None:
        helper.end()


async def _first_process(descriptor: int) -> int:
    """Return the number of the first process in a sandbox, as its launcher tells it."""
    said = b""
    while b"}" not in said and len(said) < _LARGEST_REPORT:
        await _readable(descriptor)
        said += os.read(descriptor, _LARGEST_REPORT)
    number = json.loads(said).get("child-pid")
    if not isinstance(number, int):
        raise ValueError("the launcher did not say whom it started")  # noqa: TRY004 - what it said is wrong, not a type
    return number


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _received(ours: socket.socket) -> socket.socket:
    said, given, _, _ = socket.recv_fds(ours, _LARGEST_REPORT, 1, socket.MSG_CMSG_CLOEXEC)
    if not given:
        raise OSError(said.decode(errors="replace") or "the helper ended without a word")
    listener = socket.socket(fileno=given[0])
    listener.setblocking(False)
    return listener


def owner_map(user: int) -> int | None:
    """Return a namespace in which root is a user, for the caller to close; None where this process cannot make one."""
    if os.geteuid() != 0:
        return None
    try:
        return _made(user)
    except OSError:
        return None


def _made(user: int) -> int:
    with ExitStack() as ending:
        process = Popen(_UNSHARE, stdin=PIPE, stdout=PIPE, env={})
        ending.callback(abandon, process)
        assert process.stdin is not None  # it is a pipe
        assert process.stdout is not None  # it is a pipe too
        ending.enter_context(process.stdin)
        ending.enter_context(process.stdout)
        process.stdin.write(b"\n")
        process.stdin.flush()
        # An answer means that it has entered the namespace and become `cat`.
        if not select.select([process.stdout], [], [], _PATIENCE)[0] or not os.read(process.stdout.fileno(), 1):
            raise OSError("no user namespace was made")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{kind}").write_text(f"0 {user} 1")
        return os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
