"""All ctypes calls of this package: mounts, openat2, Landlock, users."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from platform import machine
from stat import S_ISDIR
from struct import pack

from kiwi_mcp.domain.isolation import T

_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_NO_MAGIC_LINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 1 << 18
_MS_RDONLY, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MNT_DETACH = 0x1, 0x8, 0x20, 0x1000, 2
RDONLY, NOSUID, NODEV, IDMAP = 0x1, 0x2, 0x4, 0x00100000
"""Attributes of a mount: read-only, without setuid bits, without devices, with owners as a user namespace maps them."""
_PR_CAP_AMBIENT, _CLEAR_ALL = 47, 4
_SETGROUPS, _SETRESUID, _SETRESGID = (159, 147, 149) if machine() == "aarch64" else (116, 117, 119)
_libc = ctypes.CDLL(None, use_errno=True)
_text = ctypes.c_char_p
_EMPTY = _text(b"")
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _PR_SET_NO_NEW_PRIVS = 1, 1, 38
_LEAST = 3
"""The first version of the kernel's interface by which files cannot be emptied either."""
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_TO_A_FILE = _WRITE_FILE | _TRUNCATE
# Removing and making entries of every kind (bits 4 to 12), and moving them between folders.
_TO_A_FOLDER = _TO_A_FILE | 0x1FF0 | 1 << 13


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open a path below an open folder. A link on the way, or a path that leaves the folder, is an error."""
    how = ctypes.create_string_buffer(pack("=QQQ", flags | os.O_CLOEXEC, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGIC_LINKS))
    return _checked(_libc.syscall(_OPENAT2, folder, _text(os.fsencode(path)), how, ctypes.c_size_t(24)), path)


def copy_mount(descriptor: int = _AT_FDCWD, path: str = "") -> int:
    """Return a copy of the mounts at and below an open path, or one by its name, attached nowhere."""
    flags = _AT_RECURSIVE | _OPEN_TREE_CLONE | os.O_CLOEXEC | (0 if path else _AT_EMPTY_PATH)
    return _checked(_libc.syscall(_OPEN_TREE, descriptor, _text(os.fsencode(path)), ctypes.c_uint(flags)), path)


def attach_mount(mount: int, path: str) -> None:
    """Attach a copied mount at a path."""
    place = _text(os.fsencode(path))
    _checked(_libc.syscall(_MOVE_MOUNT, mount, _EMPTY, _AT_FDCWD, place, ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)), path)


def set_attributes(mount: int, attributes: int, user_namespace: int = 0) -> None:
    """Give a copied mount attributes; `user_namespace` is for `IDMAP`."""
    response = ctypes.create_string_buffer(pack("=QQQQ", attributes, 0, 0, user_namespace))
    flags = ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE)
    _checked(_libc.syscall(_MOUNT_SETATTR, mount, _EMPTY, flags, response, ctypes.c_size_t(32)))


def leave_host() -> None:
    """Give the calling thread an empty network and a mount table of its own, whose changes no other thread sees."""
    _checked(_libc.unshare(_CLONE_NEWNET))
    _checked(_libc.unshare(_CLONE_NEWNS), "/")
    _checked(_libc.mount(_text(b"none"), _text(b"/"), None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "/")


def mount_memory(path: str, *, size: int) -> None:
    """Mount an empty file system in memory, on which root can make devices."""
    flags = ctypes.c_ulong(_MS_NOSUID)
    options = _text(f"mode=755,size={size}".encode())
    _checked(_libc.mount(_text(b"kiwi"), _text(os.fsencode(path)), _text(b"tmpfs"), flags, options), path)


def seal_mount(path: str) -> None:
    """Let nothing be changed on the mount at a path any more."""
    flags = ctypes.c_ulong(_MS_RDONLY | _MS_NOSUID | _MS_REMOUNT | _MS_BIND)
    _checked(_libc.mount(None, _text(os.fsencode(path)), None, flags, None), path)


def detach_mount(path: str) -> None:
    """Take away the mount at a path; what still uses it keeps it."""
    _checked(_libc.umount2(_text(os.fsencode(path)), _MNT_DETACH), path)


def mount_terminals(path: str) -> None:
    """Mount a private instance of the terminal devices."""
    options = _text(b"newinstance,ptmxmode=0666,mode=620")
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NOEXEC)
    _checked(_libc.mount(_text(b"devpts"), _text(os.fsencode(path)), _text(b"devpts"), flags, options), path)


@contextmanager
def as_user(user: int) -> Iterator[None]:
    """Let only the calling thread run as a user, and the group of the same number, until the block ends.

    The functions of the C library would change all threads. A process that is started within the block stays that user:
    the way back is in the saved user id, which a new program does not inherit.
    """
    _checked(_libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0))
    _checked(_libc.syscall(_SETGROUPS, 0, None))
    _checked(_libc.syscall(_SETRESGID, user, user, 0))
    _checked(_libc.syscall(_SETRESUID, user, user, 0))
    try:
        yield
    finally:
        _checked(_libc.syscall(_SETRESUID, 0, 0, 0))
        _checked(_libc.syscall(_SETRESGID, 0, 0, 0))


def is_there() -> bool:
    """Whether this kernel can keep a thread from changing files."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))) >= _LEAST


def start_restricted(writable: Sequence[int] | None, spawn: Callable[[], T], /) -> T:
    """Start a process that gains no rights, and changes only the open paths in `writable` where that is not None."""

    def restricted() -> T:
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if writable is not None:
            handled = ctypes.create_string_buffer(pack("=Q", _TO_A_FOLDER))
            rules = _checked(_libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(8), ctypes.c_uint(0)))
            try:
                for descriptor in writable:
                    rights = _TO_A_FOLDER if S_ISDIR(os.fstat(descriptor).st_mode) else _TO_A_FILE
                    rule = ctypes.create_string_buffer(pack("=Qi", rights, descriptor))
                    _checked(_libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, ctypes.c_uint(0)))
                _checked(_libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint(0)))
            finally:
                os.close(rules)
        return spawn()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(restricted).result()


def _checked(answer: int, path: str = "") -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path or None)
    return answer
