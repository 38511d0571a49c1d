"""The backend `bubblewrap`: the arguments of bwrap, its pipes, and the limit of its processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from platform import machine

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import TooLarge
from kiwi_mcp.domain.isolation import (
    Handover,
    Level,
    ProcessExit,
    ResourceLimits,
    SandboxProfile,
    Spawner,
    StartGate,
    T,
    no_entry,
    start_here,
)
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox import linux, seccomp
from kiwi_mcp.sandbox.backend import (
    Backend,
    Launch,
    NoSandbox,
    SelfTest,
    always,
    failed,
    never,
    ungrantable,
)
from kiwi_mcp.sandbox.command_files import FOLDERS, find_launcher
from kiwi_mcp.sandbox.levels import FOLDER, HOME, TMP, USER, BaseFileSystem, base_profile, demands
from kiwi_mcp.sandbox.limits import (
    DENIED_CALLS,
    Cgroup,
    CgroupParent,
    MemoryWatch,
    counting,
    find_groups,
    limiting,
    start_limited,
    start_pinned,
    sweep,
)
from kiwi_mcp.sandbox.process_setup import OpenedGrant, ProcessSetup, Shields, prepare
from kiwi_mcp.sandbox.rlimits import Rlimits
from kiwi_mcp.sandbox.root_launcher import ROOT, STAGED, open_root_launcher
from kiwi_mcp.sandbox.seccomp import AF_UNIX, filter_program

_LARGEST_REPORT = 4_096
_PIPE = 65_536
"""The capacity of a pipe without a reader, in bytes."""
_FIRST = re.compile(rb'"child-pid"\s*:\s*([1-9]\d*)')
_STARTED = b'"exit-code"'
"""What the launcher reports at the end, if it got as far as starting the command."""
_INTERNET = (2, 10)
"""The families of sockets that a process with a proxy makes: IPv4 and IPv6. Their numbers are the kernel's own."""
UNPRIVILEGED_ID = 65_117
"""The user that sandboxes run as when Kiwi itself is started as root: a number that systems give to no account.

Several services share the account `nobody`. They could send signals to any process with the same number.
"""
_INSTALL = "install bubblewrap (`apt-get install bubblewrap`, `dnf install bubblewrap`)"
_STAGED = ("--dev-bind", ROOT, "/", "--proc", "/proc")
"""Lets the launcher take the file system that has been laid out."""
_ROOMS = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--hostname", "kiwi", "--uid", USER, "--gid", USER),
)


def count_at(gate: StartGate, most: int, keep: ExitStack, _: int) -> None:
    """Limit the number of processes of a sandbox as soon as its launcher reports the first one."""
    loop, said = asyncio.get_running_loop(), bytearray()

    def listen() -> None:
        said.extend(os.read(gate.child_info, _LARGEST_REPORT))
        if b"}" in said or len(said) >= _LARGEST_REPORT:
            loop.remove_reader(gate.child_info)
            # If this fails, the process waits until its timeout: it never runs without a limit.
            resource.prlimit(json.loads(said)["child-pid"], resource.RLIMIT_NPROC, (most, most))
            gate.open()

    def stop_listening() -> None:
        with suppress(RuntimeError):  # the loop has been closed
            loop.remove_reader(gate.child_info)

    loop.add_reader(gate.child_info, listen)
    keep.callback(stop_listening)


class Instructions:
    """The arguments of the launcher, which it reads from a pipe, and the descriptors that they name."""

    def __init__(self, keep: ExitStack) -> None:
        self._keep = keep
        self.words: list[str] = []
        """What the launcher reads."""
        self.lent: list[int] = []
        """The descriptors that the launcher must inherit, besides the pipe."""
        self.pipe, writing = os.pipe()
        keep.callback(os.close, self.pipe)
        self._writing = keep.enter_context(os.fdopen(writing, "wb", buffering=0))

    def lend(self, descriptor: int) -> str:
        """Pass a descriptor to the launcher, which closes it before the command starts, and return its number."""
        self.lent.append(descriptor)
        return str(descriptor)

    def file_of(self, content: bytes) -> str:
        """Pass some bytes to the launcher as a file in memory, and return the number of its descriptor."""
        descriptor = os.memfd_create("kiwi")
        self._keep.callback(os.close, descriptor)
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        self.lent.append(descriptor)
        return str(descriptor)

    def copy_of(self, path: str) -> str:
        """Let the launcher read a file of the system's, and return the number of its descriptor."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._keep.callback(os.close, descriptor)
        return self.lend(descriptor)

    def ask_to_wait(self) -> StartGate:
        """Let the launcher report the process that it started and wait before the command, and return the gate."""
        response, telling = os.pipe()
        reading, writing = os.pipe()
        # Both ends in one: the launcher would take the end of the pipe for the word to go on, should Kiwi be killed.
        waiting = os.open(f"/proc/self/fd/{reading}", os.O_RDWR | os.O_CLOEXEC)
        for descriptor in (response, telling, reading, writing, waiting):
            self._keep.callback(os.close, descriptor)
        self.words += ("--info-fd", self.lend(telling), "--block-fd", self.lend(waiting))
        return StartGate(response, lambda: _say(writing))

    def release(self, bound: Callable[[int], None], pid: int) -> None:
        """Put the launcher under its limits, and only then send its instructions."""
        text = os.fsencode("\0".join((*self.words, "")))
        if len(text) > _PIPE:
            raise TooLarge("The list of paths and variables for the sandbox", size=len(text), limit=_PIPE)
        bound(pid)
        self._writing.write(text)
        self._writing.close()


@cache
def _filter(level: Level, denied: tuple[str, ...], *, has_network: bool, has_sockets: bool) -> bytes:
    """Return the filter of system calls of a level on this machine, with further calls to refuse."""
    refused = (*(("memfd_create",) if "memfd" in demands(level).denies else ()), *denied)
    families = (*(_INTERNET if has_network else ()), *((AF_UNIX,) if has_sockets else ()))
    return filter_program(machine(), families=families, denied=refused)


def first_process(report: int) -> int:
    """Return the first process of a sandbox as its launcher reports it, 0 if none was started."""
    found = _FIRST.search(os.pread(report, _PIPE, 0))
    return int(found[1]) if found else 0


def _stop_reason(watches: Iterable[Callable[[], str]]) -> str:

    return next(filter(None, (watch() for watch in watches)), "")


def _say(writing: int) -> None:
    os.write(writing, b"\n")


class Bubblewrap(Struct, frozen=True):
    """Starts a process through `bwrap`; a program is None where the machine has none that can be trusted."""

    bwrap: str | None
    prlimit: str | None
    setpriv: str | None
    is_root: bool
    groups: CgroupParent | None = None
    owner_map: int | None = None
    """A user namespace that maps root to the unprivileged user, for files that root grants."""
    name: str = "bubblewrap"

    @property
    def limited_by(self) -> str:
        """What limits all processes of a tool together: control groups, or a watchdog where there are none."""
        return "cgroup" if self.groups is not None else "watchdog"

    def obstacles(self) -> tuple[str, ...]:
        """Return which programs are missing, and whether this machine has a filter."""
        checks = (
            (self.bwrap is None, f"bubblewrap is missing, or others than root can change it: {_INSTALL}."),
            (self.prlimit is None, "`prlimit` is missing: install util-linux."),
            (
                self.is_root and self.setpriv is None,
                "Kiwi runs as root and `setpriv` is missing: install util-linux, or run Kiwi as another user.",
            ),
            (
                seccomp.machine(machine()) is None,
                f"There is no filter of system calls for {machine()}: run the tool on x86_64 or aarch64.",
            ),
        )
        return tuple(response for is_so, response in checks if is_so)

    def fingerprint(self) -> str:
        """Return the hash of the launcher, and the properties of the machine that it depends on."""
        digest = sha256(Path(self.bwrap).read_bytes()).hexdigest() if self.bwrap else ""
        return f"{digest} {self.prlimit} {self.setpriv} {self.groups is not None} {machine()}"

    def self_test(self, secret: str) -> SelfTest | None:
        """Return a shell that tries what must not work, with limits that are small enough to be run into quickly.

        A variable that steers the start of programs is among what it is given, because the launcher must not have it.
        """
        is_grouped = self.groups is not None
        memory, room = (24 if is_grouped else 96) * 1_048_576, 4 * 1_048_576
        limits = ResourceLimits(memory, cpus=0.5, pids=40, open_files=64, cpu_seconds=30, tmp_bytes=room)
        outside = [f"{name}={Path('/proc/self/ns', name).readlink()}" for name in ("ipc", "mnt", "net", "pid", "user")]
        words = (secret, str(limits.tmp_bytes), str(limits.pids), "yes" if is_grouped else "no", *outside)
        script = (FOLDER / "self_test.sh").read_text(encoding="utf-8")
        variables = {"PATH": "/usr/bin:/bin", "PROBE": "given", "LD_BIND_NOW": "1"}
        spec = ProcessSpec(("/bin/sh", "-c", script, "self_test", *words), cwd="/", env=variables, timeout=60.0)
        return SelfTest(spec, SandboxProfile("restricted", limits=limits))

    @contextmanager
    def wrap(self, spec: ProcessSpec, profile: SandboxProfile) -> Iterator[Launch]:
        """Yield the process as the launcher's command, with every descriptor that the launcher needs open."""
        with ExitStack() as keep:
            made = prepare(spec, profile, keep)
            arguments, owner = Instructions(keep), UNPRIVILEGED_ID if self.is_root else None
            if self.is_root and profile.writable:
                owner = self._user(made.granted)
            arguments.words += _ROOMS
            arguments.words += _made(base_profile(), arguments) if owner is None else _STAGED
            # What the root launcher starts has its network, which leads nowhere, but others share its abstract sockets.
            if owner is None or profile.hosts or profile.has_sockets:
                arguments.words.append("--unshare-net")
            arguments.words += _scratch(profile.limits.tmp_bytes)
            way = self._give(made, profile, arguments, owner, keep)
            arguments.words += ("--remount-ro", "/", "--chdir", made.folder)
            for name, value in made.inside.items():
                arguments.words += ("--setenv", name, value)
            report = arguments.file_of(b"")
            arguments.words += ("--json-status-fd", report)
            gate = arguments.ask_to_wait() if profile.hosts else None
            # System calls are filtered from the launcher's own first process inside on.
            is_watched = self.groups is None
            first = partial(first_process, int(report))
            shields = Shields(made.grants[len(made.granted) :]) if profile.writable else None
            watches = [shields.replaced] if shields else []
            watches += [MemoryWatch(first, profile.limits).exceeded] if is_watched else []
            denied = DENIED_CALLS if is_watched else ()
            program = _filter(profile.level, denied, has_network=bool(profile.hosts), has_sockets=profile.has_sockets)
            arguments.words += ("--seccomp", arguments.file_of(program))
            launcher = (*way.words, str(self.bwrap), "--args", str(arguments.pipe), "--", *way.limits)
            yield Launch(
                replace(spec, argv=(*launcher, *made.argv), cwd="/", env=made.passed),
                Handover(
                    (arguments.pipe, *arguments.lent),
                    owner,
                    partial(arguments.release, way.bound),
                    gate,
                    _pinned(profile.limits, way.start) if is_watched else way.start,
                    makes_session=True,
                    first=first,
                ),
                partial(_check, int(report)),
                way.group.throttle_count if way.group is not None else never,
                partial(_stop_reason, watches) if watches else None,
                shields.is_whole if shields else always,
            )

    def _user(self, grants: Sequence[OpenedGrant]) -> int:
        """Return the user that a sandbox of root's becomes: the owner of what it may write, if that is one user."""
        owners = {grant.owner: grant.path for grant in grants if grant.is_writable}
        if 0 in owners and self.owner_map is None:
            raise ungrantable(
                owners[0],
                "it belongs to root, and a sandbox never has root's rights",
                "Start Kiwi as an ordinary user, or give the folder to one (`chown`).",
            )
        return next(iter(owners)) if len(owners) == 1 and 0 not in owners else UNPRIVILEGED_ID

    def _give(
        self, made: ProcessSetup, profile: SandboxProfile, arguments: Instructions, owner: int | None, keep: ExitStack
    ) -> _Way:
        """Lay the grants into the sandbox, hide what it must not see, and return how it is started."""
        grants = made.grants
        # The processes inside are counted by these words, unless a group counts them all together.
        counted = counting(str(self.prlimit), profile.limits) if self.groups is None else ()
        if owner is None:
            arguments.words += _laid(grants, [arguments.lend(one.descriptor) for one in grants], "-fd", made.hidden)
            counted = counted if profile.hosts else ()
            # One that waits for its network waits already.
            group, bound = self._bound(profile, arguments, keep, is_countable=not profile.hosts)
            return _Way((), counted, bound, partial(start_limited, profile.limits), group)
        try:
            cell = keep.enter_context(
                open_root_launcher(grants, self.owner_map if owner == UNPRIVILEGED_ID else None, self.groups)
            )
        except OSError as fault:
            raise failed("bubblewrap", f"what was granted cannot be laid out: {fault}".encode()) from fault
        arguments.words += _laid(grants, map(f"{STAGED}/{{}}".format, range(len(grants))), "", made.hidden)
        if cell.group is not None:
            group, bound = cell.group, partial(cell.limit, profile.limits)
        else:
            group, bound = self._bound(profile, arguments, keep, is_countable=False)
        if owner == UNPRIVILEGED_ID:
            return _Way((), counted, bound, partial(cell.start_as, UNPRIVILEGED_ID, profile.limits), group)
        # A user may send signals to processes with the same uid, so no thread of Kiwi ever takes the uid of an owner.
        entrance = (str(self.setpriv), f"--reuid={owner}", f"--regid={UNPRIVILEGED_ID}", "--clear-groups", "--")
        return _Way(entrance, (*limiting(str(self.prlimit), profile.limits), *counted), bound, cell.start, group)

    def _bound(
        self, profile: SandboxProfile, arguments: Instructions, keep: ExitStack, *, is_countable: bool
    ) -> tuple[Cgroup | None, Callable[[int], None]]:
        """Return the group of the launcher, and what bounds it, and so all that it starts, while it waits.

        Another user's process cannot be counted from outside.
        """
        if self.groups is None:
            return None, partial(
                count_at, arguments.ask_to_wait(), profile.limits.pids, keep
            ) if is_countable else no_entry
        try:
            group = keep.enter_context(self.groups.limited(profile.limits))
        except OSError as fault:
            raise failed(self.name, f"its processes cannot be bounded: {fault}".encode()) from fault
        return group, group.add


class _Way(Struct, frozen=True):
    """How a launcher is started: words before it and before what it starts, what bounds and starts it, its group."""

    words: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    bound: Callable[[int], None] = no_entry
    start: Spawner = start_here
    group: Cgroup | None = None


def _pinned(limits: ResourceLimits, start: Spawner) -> Spawner:
    """Return a start on as many processors as the limits say; the thread that starts a process passes them on."""

    def spawn_pinned(spawn: Callable[[], T], /) -> T:
        return start(partial(start_pinned, limits, spawn))

    return spawn_pinned


def _made(base: BaseFileSystem, arguments: Instructions) -> Iterator[str]:
    """Let the launcher make the file system that every sandbox begins with."""
    yield from ("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev")
    for path in base.readable:
        # A copy of a file takes the launcher a fraction of the time of a mount.
        is_file = Path(path).is_file()
        yield from (
            ("--perms", "0644", "--file", arguments.copy_of(path), path) if is_file else ("--ro-bind", path, path)
        )
    for path, target in base.links.items():
        yield from ("--symlink", target, path)
    for path, content in base.files.items():
        yield from ("--perms", "0644", "--file", arguments.file_of(content), path)


def _laid(grants: Sequence[OpenedGrant], sources: Iterable[str], kind: str, hidden: Iterable[str]) -> Iterator[str]:
    """Yield the options that mount the grants, and an empty folder or file over each hidden path.

    A missing path needs none. A grant that stays visible below a hidden folder is mounted on the empty one.
    """
    shown: dict[str, tuple[str, str, str]] = {}
    for grant, source in zip(grants, sources, strict=True):
        words = (f"--{'' if grant.is_writable else 'ro-'}bind{kind}", source, grant.path)
        if grant.is_shown:
            shown[grant.path] = words
        else:
            yield from words
    for path in hidden:
        if os.path.isdir(path):  # noqa: PTH112 - at every start
            yield from ("--perms", "0555", "--tmpfs", path)
            for inner, words in shown.items():
                if inner.startswith(f"{path}/"):
                    yield from words
            yield from ("--remount-ro", path)
        elif os.path.exists(path):  # noqa: PTH110 - as above
            yield from ("--ro-bind", "/dev/null", path)


@cache
def _scratch(size: int) -> tuple[str, ...]:
    """Return the options for what every sandbox covers, and for its own temporary folders of at most `size` bytes."""
    masks = [word for path in base_profile().masked for word in ("--ro-bind", "/dev/null", path)]
    home = ("--size", str(size), "--perms", "1777", "--tmpfs", TMP, "--perms", "0700", "--dir", HOME)
    return (*masks, *home, "--size", str(size), "--perms", "1777", "--tmpfs", "/dev/shm")  # noqa: S108 - inside


def _check(report: int, ended: ProcessExit) -> None:
    """Raise where the launcher ended by itself before the command began; what a signal ended was running."""
    if ended.exit_code is not None and _STARTED not in os.pread(report, _PIPE, 0):
        raise failed("bubblewrap", ended.stderr)


def backends(*, folders: Sequence[str] = FOLDERS, owner_map: int | None = None) -> tuple[Backend, ...]:
    """Return every backend, in order of what it costs; which of them works here, a self-test shows."""
    groups, prlimit = find_groups(), find_launcher("prlimit", folders)
    if groups is not None:
        sweep(groups.folders.values())
    return (
        NoSandbox(),
        Rlimits(prlimit, linux.is_there()),
        Bubblewrap(
            find_launcher("bwrap", folders),
            prlimit,
            find_launcher("setpriv", folders),
            is_root=os.geteuid() == 0,
            groups=groups,
            owner_map=owner_map,
        ),
    )
