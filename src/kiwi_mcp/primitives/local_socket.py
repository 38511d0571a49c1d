"""A socket in the file system that only its owner may connect to, and who is at the other end of a connection."""

from __future__ import annotations

import os
import socket
import struct
from asyncio import BaseTransport, StreamReader, StreamWriter, open_unix_connection
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from stat import S_ISSOCK

from kiwi_mcp.domain.errors import InvalidRequest, Unavailable

_LONGEST = 107
"""How many bytes the address of such a socket may have."""
_PEER = struct.Struct("3i")


def listening(path: Path) -> socket.socket:
    """Return a socket at a path, for its owner alone from its first moment; one that was left behind gives way."""
    if len(os.fsencode(path)) > _LONGEST:
        raise InvalidRequest(
            f"{path} is too long for the address of a socket.",
            suggestion=f"Choose a path of at most {_LONGEST} bytes, such as one below your home.",
        )
    _clear(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(made.fileno(), 0o600)  # what is bound takes over the permissions that it has now
        made.bind(os.fspath(path))
    except OSError as error:
        made.close()
        raise Unavailable(
            f"No socket can be made at {path}: {error.strerror or error}.",
            suggestion="Choose a path in a folder of your own.",
        ) from error
    return made


@asynccontextmanager
async def connected_pair(longest: int) -> AsyncIterator[tuple[StreamReader, StreamWriter, int]]:
    """Yield one end of a nameless connection as streams, and the other as a descriptor that a process is given."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        reader, writer = await open_unix_connection(sock=ours, limit=longest)
        try:
            yield reader, writer, theirs.fileno()
        finally:
            writer.close()


def is_own_peer(transport: BaseTransport) -> bool:
    """Whether a connection comes from a process of the same user; over a network its token says what it may do."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return True
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(uid == os.geteuid())


def _clear(path: Path) -> None:
    """Remove a socket without a listener. Refuse a socket in use, and any other file."""
    try:
        is_socket = S_ISSOCK(path.stat(follow_symlinks=False).st_mode)
    except OSError:
        return  # nothing there, or nothing that can be looked at, which the bind will say
    if not is_socket or _answers(path):
        raise Unavailable(
            f"{path} is {'in use by another process' if is_socket else 'something else than a socket'}.",
            suggestion="Choose another path, or end what listens there.",
        )
    with suppress(FileNotFoundError):
        path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(2.0)
        try:
            trial.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
