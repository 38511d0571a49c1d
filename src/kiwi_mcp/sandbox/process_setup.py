"""What a sandboxed process starts with: its program, opened paths, protected names and environment."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from operator import methodcaller
from stat import S_IFSOCK, S_ISDIR, S_ISLNK, S_ISREG, S_ISSOCK
from time import sleep, time_ns

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import CommandMissing, InvalidRequest, IsolationUnavailable
from kiwi_mcp.domain.isolation import PROXY, Handover, SandboxProfile
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.backend import ungrantable
from kiwi_mcp.sandbox.command_files import ProgramFolders, known_program
from kiwi_mcp.sandbox.levels import HOME, TMP, BaseFileSystem, base_profile, demands, folded
from kiwi_mcp.sandbox.linux import open_beneath

_ITS_OWN = ("/", "/dev", "/etc", "/proc", "/run", "/sys", "/tmp")  # noqa: S108 - names of places, nothing is written
"""Folders of which every private file system has its own."""
OBJECTS = "kiwi-objects"
"""The name under which a copy of a git folder has the objects of the real one."""
_TICK = 20_000_000
"""Longer than the clock of a file system takes from tick to tick, in nanoseconds."""
_NAME_IT = "Name a folder or a file of your own by its real path, without links on the way."


_REASONS = {
    errno.ELOOP: "there is a link on the way",
    errno.ENOENT: "there is nothing of that name",
    errno.ENOTDIR: "there is nothing of that name",
    errno.EACCES: "this user may not go there",
    errno.ENOSYS: "this kernel cannot open paths without following links; it must be Linux 5.6 or newer",
}
# What the C library itself distrusts in programs with more rights than their caller: code or files named in them are
# loaded by every program that starts, the launcher outside of the sandbox included.
_STEERING = lazy_pattern(
    r"(?:LD|MALLOC|GLIBC|DYLD)_.*|GCONV_PATH|GETCONF_DIR|HOSTALIASES|LOCALDOMAIN|LOCPATH|NIS_PATH|NLSPATH"
    r"|RESOLV_HOST_CONF|RES_OPTIONS|TZDIR|OUTPUT_CHARSET|LANGUAGE"
)
_MOST_SEARCHED = 200_000
_TIME = 0
_TRIES, _PAUSE = 100, 0.002
"""How often and how long, in seconds, the removal of placeholders by another process is waited for."""


class OpenedGrant(Struct, frozen=True):
    """A granted path that is open: the grant stays with the opened file, also if the path changes later."""

    path: str
    descriptor: int
    is_writable: bool
    is_folder: bool
    owner: int
    is_shown: bool = False
    """Whether it stays visible although the folder around it is hidden: what Kiwi installed for the process."""
    covers: tuple[int, int] | None = None
    """The device and inode outside of a protected name; the kernel removes its mount if another file takes the name."""


def open_grants(profile: SandboxProfile, needed: Iterable[str], keep: ExitStack) -> tuple[OpenedGrant, ...]:
    """Open all grants of a process and what it needs to run, outer folders first, so that nested ones lie on top."""
    wanted = {**dict.fromkeys((*needed, *profile.readable), False), **dict.fromkeys(profile.writable, True)}
    hidden, trusted = tuple(map("{}/".format, profile.hidden)), tuple(map("{}/".format, profile.trusted))
    opened: dict[str, OpenedGrant] = {}
    for path in sorted(wanted, key=methodcaller("count", "/")):
        outer = path
        while (outer := outer.rpartition("/")[0]) and outer not in opened:
            pass
        is_shown = not wanted[path] and path.startswith(hidden) and path.startswith(trusted)
        # One inside a folder that has the same access is given with the folder.
        if outer not in opened or opened[outer].is_writable != wanted[path] or is_shown > opened[outer].is_shown:
            opened[path] = _open_grant(path, keep, is_writable=wanted[path], is_shown=is_shown)
    return tuple(opened.values())


def _open_grant(path: str, keep: ExitStack, *, is_writable: bool, is_shown: bool) -> OpenedGrant:
    if not path.startswith("/") or os.path.normpath(path) != path or "\0" in path:
        raise ungrantable(path, "it is not an absolute path in its plain form", _NAME_IT)
    if path in _ITS_OWN or path.startswith(("/dev/", "/proc/", "/sys/")):
        raise ungrantable(path, "a sandbox has its own there", "Name the folder below it that is meant.")
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = open_beneath(root, path[1:], os.O_PATH)
    except OSError as fault:
        reason = _REASONS.get(fault.errno or 0) or fault.strerror or "it cannot be opened"
        raise ungrantable(path, reason, _NAME_IT) from fault
    finally:
        os.close(root)
    keep.callback(os.close, descriptor)
    state = os.fstat(descriptor)
    if not S_ISDIR(state.st_mode) and not S_ISREG(state.st_mode):
        raise ungrantable(path, "it is neither a folder nor a regular file", _NAME_IT)
    return OpenedGrant(path, descriptor, is_writable, S_ISDIR(state.st_mode), state.st_uid, is_shown)


def protected_grants(
    grants: Sequence[OpenedGrant],
    base: BaseFileSystem,
    keep: ExitStack,
    projects: Sequence[str] = (),
    git_copies: Sequence[tuple[str, str]] = (),
) -> Iterator[OpenedGrant]:
    """Yield the protected names at the top of writable folders, open, to be mounted read-only.

    `projects` are folders that Kiwi reads settings from: one inside a writable folder is protected like its top. A git
    folder that has a copy is covered by it.
    """
    copies = dict(git_copies)
    for grant in grants:
        if grant.is_writable and grant.is_folder:
            for top in (grant, *_projects_in(grant, projects, keep)):
                for one in _protected_in(top, base, keep):
                    yield from _copied(one, copies[one.path], keep) if one.path in copies else (one,)


def _copied(git: OpenedGrant, copy: str, keep: ExitStack) -> Iterator[OpenedGrant]:
    """Yield the copy of a git folder as writable, and the objects and submodules of the real one in it."""
    covering = _open_grant(copy, keep, is_writable=True, is_shown=False)
    yield OpenedGrant(git.path, covering.descriptor, True, True, covering.owner, covers=git.covers)
    for name, shown in (("objects", OBJECTS), ("modules", "modules")):
        with suppress(FileNotFoundError):
            yield replace(_opened(git, name, keep), path=f"{git.path}/{shown}", covers=None)


def _projects_in(grant: OpenedGrant, projects: Sequence[str], keep: ExitStack) -> Iterator[OpenedGrant]:
    for path in projects:
        if path.startswith(f"{grant.path}/"):
            with suppress(OSError):  # it is gone, or there is a link on the way, which the grant does not follow
                yield _opened(grant, path.removeprefix(f"{grant.path}/"), keep)


def _protected_in(top: OpenedGrant, base: BaseFileSystem, keep: ExitStack) -> Iterator[OpenedGrant]:
    try:
        if not make_placeholders(top.descriptor, base.protected, keep):
            raise ungrantable(top.path, "another process has locked it", "Try again when that process has ended.")
        names = _names(top)
    except OSError as fault:
        raise ungrantable(
            top.path, "you cannot list it", "Give yourself the right to read it (`chmod u+r`)."
        ) from fault
    for name in filter(base.is_protected, names):
        path = f"{top.path}/{name}"
        try:
            descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top.descriptor)
        except FileNotFoundError:
            continue
        keep.callback(os.close, descriptor)
        mode = os.fstat(descriptor).st_mode
        if S_ISDIR(mode) or S_ISREG(mode) or S_ISSOCK(mode):
            yield _read_only(path, descriptor)
        elif S_ISLNK(mode) and folded(name) in base.may_be_links:
            # Nothing can be mounted on a link itself: what it leads to is protected, and a changed link is put back.
            target = os.path.realpath(path)
            if target.startswith(f"{top.path}/"):
                with suppress(OSError):
                    yield _opened(top, target.removeprefix(f"{top.path}/"), keep)
        else:
            raise ungrantable(
                path, "it must stay as it is, and a link cannot be protected", "Grant folders below it instead."
            )


def _opened(top: OpenedGrant, path: str, keep: ExitStack) -> OpenedGrant:
    descriptor = open_beneath(top.descriptor, path, os.O_PATH)
    keep.callback(os.close, descriptor)
    return _read_only(f"{top.path}/{path}", descriptor)


def _read_only(path: str, descriptor: int) -> OpenedGrant:
    state = os.fstat(descriptor)
    own = (state.st_dev, state.st_ino)
    return OpenedGrant(path, descriptor, False, S_ISDIR(state.st_mode), state.st_uid, covers=own)


class Shields:
    """The protected names of a process, each mounted in its sandbox on what had that name outside at its start."""

    def __init__(self, grants: Iterable[OpenedGrant]) -> None:
        self._covered = {grant.path: grant.covers for grant in grants if grant.covers}
        self._folders = dict.fromkeys({path.rpartition("/")[0] for path in self._covered}, -1)
        self._others: frozenset[str] = frozenset()
        self._others = frozenset(path for path in self._lost() if path not in self._covered)

    def is_whole(self) -> bool:
        """Whether each protected name that is there now is protected in the sandbox."""
        return not any(self._lost())

    def replaced(self) -> str:
        """Return why a process must stop, if it must: it could change the file that another program put in place."""
        path = next((path for path in self._lost() if path in self._covered), "")
        return f"lost the protection of {path}, which another program replaced" if path else ""

    def _lost(self) -> Iterator[str]:
        for folder, before in self._folders.items():
            with suppress(OSError):
                if (changed := os.stat(folder).st_mtime_ns) == before:  # noqa: PTH116 - every 50 ms
                    continue
                names = filter(base_profile().is_protected, os.listdir(folder))  # noqa: PTH208 - as above
                paths = {f"{folder}/{name}" for name in names}
                paths |= {path for path in self._covered if path.rpartition("/")[0] == folder}
                lost = [path for path in paths - self._others if not self._is_covered(path)]
                # A file system keeps time in ticks of the kernel, so a young time may stand for two changes.
                if not lost and time_ns() - changed > _TICK:
                    self._folders[folder] = changed
                yield from lost

    def _is_covered(self, path: str) -> bool:
        try:
            state = os.lstat(path)
        except OSError:
            return False
        known = self._covered.get(path)
        return S_ISLNK(state.st_mode) if known is None else known == (state.st_dev, state.st_ino)


def _names(top: OpenedGrant) -> list[str]:
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=top.descriptor)
    try:
        return os.listdir(folder)  # noqa: PTH208 - by descriptor
    finally:
        os.close(folder)


# Always as an HTTP proxy: several clients refuse to start if ALL_PROXY is SOCKS and they lack a package for it. The
# port supports SOCKS 5 too, for programs that are configured to use it.
def proxy_variables() -> Mapping[str, str]:
    """Return the variables by which programs find the proxy of a process that has one."""
    named = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), f"http://{PROXY[0]}:{PROXY[1]}")
    named |= {"NO_PROXY": ""}
    return {**named, **{name.lower(): value for name, value in named.items()}, "NODE_USE_ENV_PROXY": "1"}


def refuse_without_gate(profile: SandboxProfile, handover: Handover, backend: str) -> None:
    """Refuse a process that needs hosts if its backend provides no proxy."""
    if profile.hosts and handover.gate is None and "net_none_or_proxy" in demands(profile.level).requires:
        raise IsolationUnavailable(
            f"The tool needs {', '.join(profile.hosts)}, and {backend} gives a process no way to single hosts. "
            "The tool was not run.",
            suggestion="Install bubblewrap, which does, or remove `needs.hosts` from the tool.",
            level=profile.level,
            backend=backend,
            hosts=list(profile.hosts),
        )


def refuse_hosts(profile: SandboxProfile) -> None:
    """Refuse a base that names hosts at a level without a network."""
    if profile.hosts and "net_none" in demands(profile.level).requires:
        raise IsolationUnavailable(
            f"Isolation level {profile.level!r} has no network, and the tool needs {', '.join(profile.hosts)}. "
            "The tool was not run.",
            suggestion="Let the owner choose the level `sandboxed` for this tool, or remove `needs.hosts` from it.",
            level=profile.level,
            hosts=list(profile.hosts),
        )


def split_environment(env: Mapping[str, str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the variables that the launcher passes on, and those that it sets inside without having them itself."""
    passed: dict[str, str] = {}
    inside: dict[str, str] = {}
    for name, value in env.items():
        is_inside = _STEERING.fullmatch(name) or not (name.isascii() and name.isidentifier())
        (inside if is_inside else passed)[name] = value
        if is_inside and "${" in value:
            raise InvalidRequest(
                f"{name} would steer how programs start, and cannot hold the value of a secret.",
                suggestion="Give the secret to the tool under a name of its own.",
            )
    return {**passed, "HOME": HOME, "TMPDIR": TMP}, inside


class ProcessSetup(Struct, frozen=True):
    """The input of a launcher for one process. The block that prepared it closes its open descriptors."""

    argv: tuple[str, ...]
    granted: tuple[OpenedGrant, ...]
    """What was asked for, and what the program itself needs."""
    grants: tuple[OpenedGrant, ...]
    """These, and then the paths inside that are read-only: each is mounted on top of those before it."""
    hidden: tuple[str, ...]
    """The paths inside that are hidden."""
    folder: str
    """Where it starts."""
    passed: Mapping[str, str]
    """Variables that the launcher may have too."""
    inside: Mapping[str, str]
    """Variables that only the process may have."""


def prepare(spec: ProcessSpec, profile: SandboxProfile, keep: ExitStack) -> ProcessSetup:
    """Find the program of a process and open what it is given."""
    if profile.hosts:
        refuse_hosts(profile)
    passed, inside = split_environment({**spec.env, **proxy_variables()} if profile.hosts else spec.env)
    around = ProgramFolders(profile.closed, profile.trusted, (*profile.readable, *profile.writable))
    command = spec.argv[0]
    found: str | None = command
    if "/" not in command:
        folders = [folder for folder in spec.env.get("PATH", os.defpath).split(":") if folder.startswith("/")]
        found = shutil.which(command, path=":".join(folders))
    elif not command.startswith("/"):
        found = f"{spec.cwd}/{command}"
    if found is None or not os.path.isfile(found) or not os.access(found, os.X_OK):  # noqa: PTH113 - at every start
        raise CommandMissing(command, needed_by="the call")
    # It is looked at again if it changed, or if it is a link to something that did.
    own, target = os.lstat(found), os.stat(found)  # noqa: PTH116 - at every start
    state = (own.st_ino, own.st_ctime_ns, target.st_dev, target.st_ino, target.st_ctime_ns)
    program = known_program(found, state, base_profile().covers, around)
    granted = open_grants(profile, program.roots, keep)
    if profile.has_sockets:
        for grant in granted:
            if grant.is_folder and not f"{grant.path}/".startswith(tuple(map("{}/".format, profile.trusted))):
                refuse_sockets(grant.path, "The server may make Unix sockets: give it a folder of its own.")
    copies = profile.git_copies
    # No program obeys what is in a scratch folder: no name is protected there.
    owners = [grant for grant in granted if grant.path != profile.scratch] if profile.scratch else granted
    shields = protected_grants(owners, base_profile(), keep, profile.closed, copies) if profile.writable else ()
    # It starts where it was to, if that or something in it was granted, else in its home. What is given of a folder
    # lies in it under its own name, so that paths that begin in the folder lead there.
    folder, inside_it = HOME, f"{spec.cwd.rstrip('/')}/"
    for grant in granted:
        if grant.is_folder and inside_it.startswith(f"{grant.path}/"):
            folder = spec.cwd
    for path in (*profile.readable, *profile.writable):
        if f"{path}/".startswith(inside_it):
            folder = spec.cwd
    return ProcessSetup(
        argv=(program.path, *spec.argv[1:]),
        granted=granted,
        grants=(*granted, *shields),
        hidden=(*profile.hidden, *_secrets(program.roots)) if program.roots else profile.hidden,
        folder=folder,
        passed=passed,
        inside=inside,
    )


def _secrets(roots: Sequence[str]) -> Iterator[str]:
    """Yield the files with variables that lie in what a program was installed to: it may be a project of its own."""
    for root in roots:
        if os.path.isdir(root):  # noqa: PTH112 - at every start
            yield from (f"{root}/{name}" for name in os.listdir(root) if name == ".env" or name.startswith(".env."))  # noqa: PTH208 - as above


def refuse_sockets(folder: str, fix: str) -> None:
    """Refuse a folder with a socket in it: a process that may make Unix sockets could connect to that program."""
    folders, count = [folder], 0
    while folders:
        with suppress(PermissionError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                    state = entry.stat(follow_symlinks=False)
                    if S_ISSOCK(state.st_mode) and not _looks_so(state):
                        raise ungrantable(folder, f"{entry.path} is a socket of another program", fix)
        if count > _MOST_SEARCHED:
            raise ungrantable(folder, "it has too many files to look for sockets of other programs in it", fix)


def is_placeholder(path: str) -> bool:
    """Whether a path is a placeholder; earlier versions used empty files and folders."""
    try:
        state = os.lstat(path)
        if not _looks_so(state):
            return False
        return not S_ISDIR(state.st_mode) or not os.listdir(path)  # noqa: PTH208 - text, as all that is on the way of every call
    except OSError:
        return False


def _looks_so(state: os.stat_result) -> bool:
    """Whether something may be a placeholder, by its kind and times; a folder must be empty besides."""
    if state.st_mtime_ns != _TIME:
        return False
    is_empty_file = S_ISREG(state.st_mode) and state.st_size == 0 and not state.st_mode & 0o222
    return S_ISDIR(state.st_mode) or S_ISSOCK(state.st_mode) or is_empty_file


def make_placeholders(folder: int, names: Sequence[str], keep: ExitStack) -> bool:
    """Put a placeholder wherever one of some names is free in an open folder, until `keep` ends.

    The folder is locked for as long, together with other processes that do the same. Returns False where another
    process has the lock for itself.
    """
    locked = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    if not _is_shared(locked):
        os.close(locked)
        return False
    keep.callback(_release, locked, names)
    there = frozenset(os.listdir(locked))  # noqa: PTH208 - by descriptor
    socket = ""
    for name in (name for name in names if name not in there):
        # A folder that this user cannot write to keeps the process out by itself.
        with suppress(OSError):
            if name == ".git":
                os.mkdir(name, 0o755, dir_fd=locked)
            else:
                with suppress(OSError):  # to make another socket is many times slower than to link one
                    os.link(socket, name, src_dir_fd=locked, dst_dir_fd=locked)
                    continue
                try:
                    os.mknod(name, S_IFSOCK | 0o444, dir_fd=locked)
                    socket = name
                except PermissionError:  # where there are no sockets, an empty file does
                    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=locked))
                    socket = ""
            os.utime(name, (_TIME, _TIME), dir_fd=locked, follow_symlinks=False)
    return True


def _is_shared(locked: int) -> bool:
    for _ in range(_TRIES):
        try:
            flock(locked, LOCK_SH | LOCK_NB)
        except OSError:
            sleep(_PAUSE)
        else:
            return True
    return False


def _release(locked: int, names: Sequence[str]) -> None:
    """Remove the placeholders, unless another process needs them. A folder that is no longer empty is the owner's."""
    with suppress(OSError):
        flock(locked, LOCK_EX | LOCK_NB)
        for name in names:
            with suppress(OSError):
                state = os.lstat(name, dir_fd=locked)
                if _looks_so(state):
                    remove = os.rmdir if S_ISDIR(state.st_mode) else os.unlink
                    remove(name, dir_fd=locked)
    os.close(locked)
