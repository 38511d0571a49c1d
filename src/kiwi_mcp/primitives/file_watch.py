"""Notice changes of files: one look at an inotify queue instead of a stat of each file.

A path is watched with all that it leads through: the folders on the way, symbolic links, and the file itself, so that a
write through another hard link, a rename, an exchanged link or a moved parent folder is noticed. Where inotify does not
report every change, the path is compared by stat at each look.
"""

from __future__ import annotations

import ctypes
import os
import select
import stat
import struct
import time
from collections.abc import Iterable
from threading import RLock
from typing import TypeAlias

_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x8, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_UNMOUNT, _OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_DONT_FOLLOW, _MASK_ADD = 0x02000000, 0x20000000
_SELF = _ATTRIB | _DELETE_SELF | _MOVE_SELF
_WRITES = _SELF | _MODIFY | _CLOSE_WRITE
"""What a write through a memory map leaves is an event when the file is closed."""
_ENTRIES = _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO
_EVENT = struct.Struct("iIII")
_RELIABLE = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010, 0x2FC12FC1})
"""File systems that report every change: ext4, XFS, Btrfs, tmpfs, F2FS, ZFS. Network, FUSE and overlay ones do not."""
_MOST_LINKS = 40
_MOST_WATCHES = 8_192
"""How many inodes are watched; beyond that all watches begin anew."""
_RACY_NS = 50_000_000
"""How old a change must be for a stat to prove that no other followed: clocks of file systems tick every few ms."""
_Stamp: TypeAlias = tuple[int, ...]
_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """A number that changes when a watched path may have changed; it may be used from several threads."""

    def __init__(self, *, has_inotify: bool = True) -> None:
        self._lock = RLock()
        self._has_inotify = has_inotify
        self._generation = 0
        self._watched: set[tuple[str, bool]] = set()
        self._folders: set[str] = set()
        """The folders that are watched with all that they lead through, and no link among it."""
        self._stats: dict[str, _Stamp] = {}
        self._names: dict[int, set[str] | None] = {}
        """For each inotify watch the names that matter in that folder; None where all do."""
        self._queue = -1
        self._mounts = -1
        self._poll = select.poll()

    def generation(self) -> int:
        """Return a number that differs from the last one if a watched path may have changed since."""
        with self._lock:
            if self._queue >= 0:
                for descriptor, _ in self._poll.poll(0):
                    # A new mount may cover any path, without an event on it.
                    if descriptor == self._mounts or self._is_changed():
                        self._advance()
            for path, stamp in self._stats.items():
                if _stamp(path) != stamp:
                    self._advance()
                    break
            return self._generation

    def watch(self, files: Iterable[str], folders: Iterable[str] = ()) -> int:
        """Watch files and folders, absolute paths, that may be missing; of a folder its entries too.

        Return the generation in which they are watched. What was read of them before must be read once more
        afterwards: a change in between is not noticed.
        """
        with self._lock:
            self._open()
            self.generation()  # what is waiting is not about these; it may end the watches of all others
            if len(self._names) > _MOST_WATCHES:
                self._begin_anew()
            for path, is_listed in [*((path, False) for path in files), *((path, True) for path in folders)]:
                if (path, is_listed) not in self._watched:
                    self._watched.add((path, is_listed))
                    if self._queue < 0 or not self._watch(path, is_listed=is_listed):
                        stamp = _stamp(path)
                        # Where a further change may leave the same stamp, it is one that no path has.
                        is_settled = time.time_ns() - max(stamp[4::5], default=0) > _RACY_NS
                        self._stats[path] = stamp if is_settled else (-1,)
            return self._generation

    def close(self) -> None:
        """Stop watching. The number changes, so that nothing stays valid by it."""
        with self._lock:
            self._generation += 1
            self._begin_anew()

    def forget_parent(self) -> None:
        """Begin anew in a forked process: a queue that is shared with the parent would lose events."""
        self._lock = RLock()  # another thread of the parent may have been using it
        self.close()

    def _begin_anew(self) -> None:
        for descriptor in (self._queue, self._mounts):
            if descriptor >= 0:
                os.close(descriptor)
        self._queue = self._mounts = -1
        self._poll = select.poll()
        self._names.clear()
        self._advance()

    def _advance(self) -> None:
        # What a path leads through may be another folder now, so all paths are watched anew by those who need them.
        self._generation += 1
        self._watched.clear()
        self._folders.clear()
        self._stats.clear()

    def _open(self) -> None:
        if self._queue >= 0 or not self._has_inotify:
            return
        queue = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if queue < 0:  # too many of this user's
            return
        try:
            self._mounts = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(queue)
            return
        self._queue = queue
        self._poll.register(queue, select.POLLIN)
        self._poll.register(self._mounts, select.POLLPRI)
        self._poll.poll(0)  # the first look at the mounts reports a change

    def _is_changed(self) -> bool:
        """Read the queue, and return whether an event in it is about a watched path."""
        is_changed = False
        while True:
            try:
                data = os.read(self._queue, 65_536)
            except BlockingIOError:
                return is_changed
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                names = self._names.get(number)
                if mask & (_OVERFLOW | _UNMOUNT) or not name or names is None or os.fsdecode(name) in names:
                    is_changed = is_changed or number in self._names or bool(mask & _OVERFLOW)
                if mask & _IGNORED:
                    self._names.pop(number, None)

    def _watch(self, path: str, *, is_listed: bool) -> bool:
        """Watch a path and all that it leads through; return whether every change of it will be reported."""
        links, (folder, _, name) = 0, path.rpartition("/")
        parts = [name]
        if folder not in self._folders:  # what is beside another watched file begins in its folder
            parts, folder = [part for part in reversed(path.split("/")) if part], "/"
            if not path.startswith("/") or not self._add(folder, _SELF, ()):
                return False
        while parts:
            name = parts.pop()
            if name == ".":
                continue
            if name == "..":
                folder = folder.rpartition("/")[0] or "/"
                continue
            place = f"{folder.rstrip('/')}/{name}"
            try:
                found = os.lstat(place)
            except FileNotFoundError:
                return self._add(folder, _SELF | _ENTRIES, (name,)) and not os.path.lexists(place)
            except OSError:
                return False
            if stat.S_ISLNK(found.st_mode):
                links += 1
                if links > _MOST_LINKS or not self._add(folder, _SELF | _ENTRIES, (name,)):
                    return False
                target = os.readlink(place)  # noqa: PTH115 - text throughout
                parts += [part for part in reversed(target.split("/")) if part]
                folder = "/" if target.startswith("/") else folder
                continue
            if stat.S_ISDIR(found.st_mode):
                if not self._add(place, _SELF, ()) or not _is_still(found, place):
                    return False
                folder = place
                if not links:
                    self._folders.add(place)
                continue
            # A file with more than one name is compared by stat as well.
            is_watched = self._add(folder, _SELF | _ENTRIES, (name,)) and self._add(place, _WRITES, ())
            is_plain = not parts and found.st_nlink == 1 and stat.S_ISREG(found.st_mode)
            return is_watched and is_plain and _is_still(found, place)
        return not is_listed or self._add(folder, _SELF | _ENTRIES, None)

    def _add(self, path: str, mask: int, names: Iterable[str] | None) -> bool:
        """Add to what is watched of an inode; return whether it is reported."""
        buffer = ctypes.create_string_buffer(256)  # begins with the number of the type of the file system
        if _libc.statfs(os.fsencode(path), buffer) != 0 or struct.unpack_from("l", buffer)[0] not in _RELIABLE:
            return False
        number = _libc.inotify_add_watch(self._queue, os.fsencode(path), mask | _DONT_FOLLOW | _MASK_ADD)
        if number < 0:
            return False
        known = self._names.setdefault(number, set())
        if names is None:
            self._names[number] = None
        elif known is not None:
            known.update(names)
        return True


def _is_still(found: os.stat_result, path: str) -> bool:
    """Whether a path still leads to what was found there, now that it is watched."""
    try:
        now = os.lstat(path)
    except OSError:
        return False
    return (now.st_dev, now.st_ino, now.st_mode) == (found.st_dev, found.st_ino, found.st_mode)


def _stamp(path: str) -> _Stamp:
    """Return what tells two states of a path apart, of a link and of what it leads to; nothing where nothing is."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return ()
    own = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if not stat.S_ISLNK(found.st_mode):
        return own
    try:
        found = os.stat(path)  # noqa: PTH116 - text, as all that is on the way of every call
    except OSError:
        return (*own, 0)
    return (*own, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


watch = FileWatch()
"""The watch of this process: the kernel allows a user few queues."""
os.register_at_fork(after_in_child=watch.forget_parent)
