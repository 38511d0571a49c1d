"""Calls of the Linux kernel that Python has no function for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from platform import machine
from struct import pack

_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_NO_MAGIC_LINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 1 << 18
_MS_RDONLY, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MNT_DETACH = 0x1, 0x8, 0x20, 0x1000, 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_IDMAP = 0x1, 0x2, 0x4, 0x00100000
_PR_CAP_AMBIENT, _CLEAR_ALL = 47, 4
_SETGROUPS, _SETRESUID, _SETRESGID = (159, 147, 149) if machine() == "aarch64" else (116, 117, 119)
_libc = ctypes.CDLL(None, use_errno=True)
_text = ctypes.c_char_p
_EMPTY = _text(b"")


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open what lies at a path below an open folder; a link anywhere on the way, or a way out, is an error."""
    how = ctypes.create_string_buffer(pack("=QQQ", flags | os.O_CLOEXEC, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGIC_LINKS))
    return _done(_libc.syscall(_OPENAT2, folder, _text(os.fsencode(path)), how, ctypes.c_size_t(24)), path)


def copy_mount(descriptor: int) -> int:
    """Return a copy of the mounts below an open path, attached nowhere."""
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE | _OPEN_TREE_CLONE | os.O_CLOEXEC
    return _done(_libc.syscall(_OPEN_TREE, descriptor, _EMPTY, ctypes.c_uint(flags)), "")


def copy_mount_at(path: str) -> int:
    """Return a copy of the mounts at and below a path, attached nowhere."""
    flags = _AT_RECURSIVE | _OPEN_TREE_CLONE | os.O_CLOEXEC
    return _done(_libc.syscall(_OPEN_TREE, _AT_FDCWD, _text(os.fsencode(path)), ctypes.c_uint(flags)), path)


def attach_mount(mount: int, path: str) -> None:
    """Attach a copied mount at a path."""
    place = _text(os.fsencode(path))
    _done(_libc.syscall(_MOVE_MOUNT, mount, _EMPTY, _AT_FDCWD, place, ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)), path)


def map_owners(mount: int, user_namespace: int) -> None:
    """Let a copied mount show the owners of its files, and keep those of new ones, as a user namespace maps them."""
    _set_attributes(mount, _ATTR_IDMAP, user_namespace)


def restrict_mount(mount: int, *, is_device: bool) -> None:
    """Let nobody gain rights through a copied mount nor, unless it is a device, write to it or use devices on it."""
    _set_attributes(mount, _ATTR_NOSUID if is_device else _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0)


def _set_attributes(mount: int, attributes: int, user_namespace: int) -> None:
    told = ctypes.create_string_buffer(pack("=QQQQ", attributes, 0, 0, user_namespace))
    flags = ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE)
    _done(_libc.syscall(_MOUNT_SETATTR, mount, _EMPTY, flags, told, ctypes.c_size_t(32)), "")


def leave_mounts() -> None:
    """Give the calling thread a table of mounts of its own, changes of which nobody else sees."""
    _done(_libc.unshare(_CLONE_NEWNS), "/")
    _done(_libc.mount(_text(b"none"), _text(b"/"), None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "/")


def leave_network() -> None:
    """Give the calling thread a network of its own, in which there is nothing."""
    _done(_libc.unshare(_CLONE_NEWNET), "")


def mount_memory(path: str, *, size: int) -> None:
    """Mount an empty file system in memory, on which root can make devices."""
    flags = ctypes.c_ulong(_MS_NOSUID)
    options = _text(f"mode=755,size={size}".encode())
    _done(_libc.mount(_text(b"kiwi"), _text(os.fsencode(path)), _text(b"tmpfs"), flags, options), path)


def seal_mount(path: str) -> None:
    """Let nothing be changed on the mount at a path any more."""
    flags = ctypes.c_ulong(_MS_RDONLY | _MS_NOSUID | _MS_REMOUNT | _MS_BIND)
    _done(_libc.mount(None, _text(os.fsencode(path)), None, flags, None), path)


def detach_mount(path: str) -> None:
    """Take away the mount at a path; what still uses it keeps it."""
    _done(_libc.umount2(_text(os.fsencode(path)), _MNT_DETACH), path)


def mount_terminals(path: str) -> None:
    """Mount terminals that are nobody else's."""
    options = _text(b"newinstance,ptmxmode=0666,mode=620")
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NOEXEC)
    _done(_libc.mount(_text(b"devpts"), _text(os.fsencode(path)), _text(b"devpts"), flags, options), path)


@contextmanager
def as_user(user: int) -> Iterator[None]:
    """Let the calling thread, and nobody else, be a user and the group of its number, until the block ends.

    The C library's own functions would change all threads. What is started within the block is that user for good:
    the way back is kept in the saved number, which a new program does not inherit.
    """
    _done(_libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0), "")
    _done(_libc.syscall(_SETGROUPS, 0, None), "")
    _done(_libc.syscall(_SETRESGID, user, user, 0), "")
    _done(_libc.syscall(_SETRESUID, user, user, 0), "")
    try:
        yield
    finally:
        _done(_libc.syscall(_SETRESUID, 0, 0, 0), "")
        _done(_libc.syscall(_SETRESGID, 0, 0, 0), "")


def _done(answer: int, path: str) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path or None)
    return answer
