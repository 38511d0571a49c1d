"""Calls of the Linux kernel that Python has no function for."""

from __future__ import annotations

import ctypes
import os
from struct import pack

_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_NO_MAGIC_LINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08
_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 1 << 18
_ATTR_IDMAP = 0x00100000
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


def attach_mount(mount: int, path: str) -> None:
    """Attach a copied mount at a path."""
    place = _text(os.fsencode(path))
    _done(_libc.syscall(_MOVE_MOUNT, mount, _EMPTY, _AT_FDCWD, place, ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)), path)


def map_owners(mount: int, user_namespace: int) -> None:
    """Let a copied mount show the owners of its files, and keep those of new ones, as a user namespace maps them."""
    attributes = ctypes.create_string_buffer(pack("=QQQQ", _ATTR_IDMAP, 0, 0, user_namespace))
    flags = ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE)
    _done(_libc.syscall(_MOUNT_SETATTR, mount, _EMPTY, flags, attributes, ctypes.c_size_t(32)), "")


def leave_mounts() -> None:
    """Give the calling thread a table of mounts of its own, changes of which nobody else sees."""
    _done(_libc.unshare(_CLONE_NEWNS), "/")
    _done(_libc.mount(_text(b"none"), _text(b"/"), None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "/")


def mount_memory(path: str, *, size: int) -> None:
    """Mount an empty file system in memory."""
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    options = _text(f"mode=755,size={size}".encode())
    _done(_libc.mount(_text(b"kiwi"), _text(os.fsencode(path)), _text(b"tmpfs"), flags, options), path)


def _done(answer: int, path: str) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path or None)
    return answer
