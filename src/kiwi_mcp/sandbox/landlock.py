"""Landlock: a thread that can change only some files, and everything that is started from it likewise.

The kernel restricts a thread for good, and whatever comes of it. So a thread is made, restricted, starts the process
and ends: nothing stands between Kiwi and the process, and nothing of Kiwi's own is restricted.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from stat import S_ISDIR
from struct import pack

from kiwi_mcp.domain.isolation import T

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _PR_SET_NO_NEW_PRIVS = 1, 1, 38
_LEAST = 3
"""The first version of the kernel's interface by which files cannot be emptied either."""
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_TO_A_FILE = _WRITE_FILE | _TRUNCATE
# Removing and making entries of every kind (bits 4 to 12), and moving them between folders.
_TO_A_FOLDER = _TO_A_FILE | 0x1FF0 | 1 << 13
_OPEN_TO_ALL = ("/dev/full", "/dev/null", "/dev/ptmx", "/dev/pts", "/dev/shm", "/dev/tty", "/dev/zero")  # noqa: S108 - memory and terminals, which programs expect
_libc = ctypes.CDLL(None, use_errno=True)


def is_there() -> bool:
    """Whether this kernel can keep a thread from changing files."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))) >= _LEAST


def start_restricted(writable: Sequence[int] | None, spawn: Callable[[], T], /) -> T:
    """Start a process that gains no rights by what it executes and changes nothing but what lies at open paths.

    Where they are None, it changes what its user may.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_restricted, writable, spawn).result()


def _restricted(writable: Sequence[int] | None, spawn: Callable[[], T]) -> T:
    _done(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if writable is not None:
        _restrict_thread({descriptor: _rights(descriptor) for descriptor in writable})
    return spawn()


def _restrict_thread(allowed: Mapping[int, int]) -> None:
    handled = ctypes.create_string_buffer(pack("=Q", _TO_A_FOLDER))
    rules = _done(_libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(8), ctypes.c_uint(0)))
    try:
        for descriptor, rights in allowed.items():
            rule = ctypes.create_string_buffer(pack("=Qi", rights, descriptor))
            _done(_libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, ctypes.c_uint(0)))
        _done(_libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint(0)))
    finally:
        os.close(rules)


def open_common(keep: ExitStack) -> Iterator[int]:
    """Open what every program may write to."""
    for path in _OPEN_TO_ALL:
        with suppress(OSError):  # not on this machine
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            keep.callback(os.close, descriptor)
            yield descriptor


def _rights(descriptor: int) -> int:
    return _TO_A_FOLDER if S_ISDIR(os.fstat(descriptor).st_mode) else _TO_A_FILE


def _done(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer
