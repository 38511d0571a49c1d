"""The backend `bubblewrap`: a file system, processes, network and names of its own, and a filter of system calls.

The launcher is the system's own, is started by a user without rights and with nothing in its environment but what the
confined process gets. What it is to do comes through a pipe that ends only when the process has been put under its
limits, so nothing runs before. Started as root, Kiwi stages what it grants and becomes another user first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from platform import machine

from kiwi_mcp.domain.isolation import Handover, Jail, Limits, Start, no_entry, start_here
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.cells import Cell, laid_out
from kiwi_mcp.sandbox.cgroup import Group, Groups
from kiwi_mcp.sandbox.counts import count_at
from kiwi_mcp.sandbox.grants import Opened
from kiwi_mcp.sandbox.instructions import Instructions, has_begun
from kiwi_mcp.sandbox.limits import counting, limiting, start_limited
from kiwi_mcp.sandbox.port import Confined, Ended, SelfTest, never
from kiwi_mcp.sandbox.prepared import prepare
from kiwi_mcp.sandbox.profile import HOME, TMP, USER, Profile, base_profile
from kiwi_mcp.sandbox.refusals import failed, ungrantable, unlaid
from kiwi_mcp.sandbox.seccomp import is_supported
from kiwi_mcp.sandbox.self_test import self_test
from kiwi_mcp.sandbox.staging import ROOT, staged_path

NOBODY = 65_117
"""The user that sandboxes run as when Kiwi itself is started as root: a number that systems give to no account.

The one that is called nobody is several services' own, which could send signals to whatever has the same number.
"""
_INSTALL = "install bubblewrap (`apt-get install bubblewrap`, `dnf install bubblewrap`)"
_ROOMS = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--hostname", "kiwi", "--uid", USER, "--gid", USER),
)


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Starts a process through `bwrap`; a program is None where the machine has none that can be trusted."""

    bwrap: str | None
    prlimit: str | None
    setpriv: str | None
    is_root: bool
    groups: Groups | None = None
    owner_map: int | None = None
    """A user namespace in which root is the unprivileged user, for what is granted by root."""
    name: str = "bubblewrap"

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
                not is_supported(machine()),
                f"There is no filter of system calls for {machine()}: run the tool on x86_64 or aarch64.",
            ),
        )
        return tuple(told for is_so, told in checks if is_so)

    def fingerprint(self) -> str:
        """Return the hash of the launcher, and what it stands on."""
        digest = sha256(Path(self.bwrap).read_bytes()).hexdigest() if self.bwrap else ""
        return f"{digest} {self.prlimit} {self.setpriv} {self.groups is not None} {machine()}"

    def self_test(self, secret: str) -> SelfTest | None:
        """Return a shell that tries what must not work."""
        return self_test(secret, is_grouped=self.groups is not None)

    @contextmanager
    def wrap(self, spec: ProcessSpec, jail: Jail) -> Iterator[Confined]:
        """Give the process as the launcher's command, with everything the launcher needs open."""
        with ExitStack() as keep:
            yield self._wrapped(spec, jail, keep)

    def _wrapped(self, spec: ProcessSpec, jail: Jail, keep: ExitStack) -> Confined:
        made = prepare(spec, jail, keep)
        profile, told, owner = base_profile(), Instructions(keep), self._user(made.granted)
        told.add(*_ROOMS, *(_made(profile, told) if owner is None else _staged()))
        if owner is None or jail.hosts:  # what is started from a cell has the network of the cell, which leads nowhere
            told.add("--unshare-net")
        told.add(*_masks(profile), *_scratch(jail.limits))
        way = self._give(made.grants, jail, told, owner, keep)
        told.add(*_covered(made.hidden))
        told.add("--remount-ro", "/", "--chdir", made.folder)
        for name, value in made.inside.items():
            told.add("--setenv", name, value)
        report = told.ask_for_report()
        gate = told.ask_to_wait() if jail.hosts else None
        told.filter_by(jail)
        launcher = (*way.words, str(self.bwrap), "--args", str(told.pipe), "--", *way.limits)
        return Confined(
            replace(spec, argv=(*launcher, *made.argv), cwd="/", env=made.passed),
            Handover(told.descriptors(), owner, partial(told.release, way.bound), gate, way.start, makes_session=True),
            partial(_check, report),
            way.group.held_back if way.group is not None else never,
        )

    def _user(self, grants: Sequence[Opened]) -> int | None:
        """Return the user that a sandbox of root's becomes: the owner of what it may write, if that is one user."""
        if not self.is_root:
            return None
        owners = {grant.owner: grant.path for grant in grants if grant.is_writable}
        if 0 in owners and self.owner_map is None:
            raise ungrantable(
                owners[0],
                "it belongs to root, and a sandbox never has root's rights",
                "Start Kiwi as an ordinary user, or give the folder to one (`chown`).",
            )
        return next(iter(owners)) if len(owners) == 1 and 0 not in owners else NOBODY

    def _give(
        self, grants: Sequence[Opened], jail: Jail, told: Instructions, owner: int | None, keep: ExitStack
    ) -> _Way:
        """Lay the grants into the sandbox, and return how it is started so that it has them."""
        if owner is None:
            for grant in grants:
                told.add("--bind-fd" if grant.is_writable else "--ro-bind-fd", told.lend(grant.descriptor), grant.path)
            counted = self._counted(jail) if jail.hosts else ()
            group, bound = self._bound(jail, told, None, keep)
            return _Way((), counted, bound, partial(start_limited, jail.limits), group)
        try:
            cell = keep.enter_context(laid_out(grants, self.owner_map if owner == NOBODY else None, self.groups))
        except OSError as fault:
            raise unlaid(fault) from fault
        for index, grant in enumerate(grants):
            told.add("--bind" if grant.is_writable else "--ro-bind", staged_path(index), grant.path)
        (group, bound), counted = self._bound(jail, told, cell, keep), self._counted(jail)
        if owner == NOBODY:
            return _Way((), counted, bound, partial(cell.start_as, NOBODY, jail.limits), group)
        # Somebody may send signals to whoever has the same number, so no thread of Kiwi's ever takes an owner's.
        entrance = (str(self.setpriv), f"--reuid={owner}", f"--regid={NOBODY}", "--clear-groups", "--")
        return _Way(entrance, (*limiting(str(self.prlimit), jail.limits), *counted), bound, cell.start, group)

    def _counted(self, jail: Jail) -> tuple[str, ...]:
        """Return the words that have the processes inside counted, unless a group counts them all together."""
        return counting(str(self.prlimit), jail.limits) if self.groups is None else ()

    def _bound(
        self, jail: Jail, told: Instructions, cell: Cell | None, keep: ExitStack
    ) -> tuple[Group | None, Callable[[int], None]]:
        """Return the group of the launcher, and what bounds it, and so all that it starts, while it waits."""
        if cell is not None and cell.group is not None:
            return cell.group, partial(cell.limit, jail.limits)
        if self.groups is None:
            # Another user's process cannot be counted from outside, and one that waits for its network waits already.
            is_countable = cell is None and not jail.hosts
            return None, partial(count_at, told.ask_to_wait(), jail.limits.pids, keep) if is_countable else no_entry
        try:
            group = keep.enter_context(self.groups.limited(jail.limits))
        except OSError as fault:
            raise failed(self.name, f"its processes cannot be bounded: {fault}".encode()) from fault
        return group, group.add


@dataclass(frozen=True, slots=True)
class _Way:
    """How a launcher is started: words before it and before what it starts, what bounds and starts it, its group."""

    words: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    bound: Callable[[int], None] = no_entry
    start: Start = start_here
    group: Group | None = None


def _made(profile: Profile, told: Instructions) -> Iterator[str]:
    """Let the launcher make the file system that every sandbox begins with."""
    yield from ("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev")
    for path in profile.readable:
        # A copy of a file takes the launcher a fraction of the time of a mount.
        is_file = Path(path).is_file()
        yield from ("--perms", "0644", "--file", told.copy_of(path), path) if is_file else ("--ro-bind", path, path)
    for path, target in profile.links.items():
        yield from ("--symlink", target, path)
    for path, content in profile.files.items():
        yield from ("--perms", "0644", "--file", told.file_of(content), path)


def _staged() -> tuple[str, ...]:
    """Let the launcher take the one that has been laid out."""
    return ("--dev-bind", ROOT, "/", "--proc", "/proc")


def _masks(profile: Profile) -> Iterator[str]:
    for path in profile.masked:
        yield from ("--ro-bind", "/dev/null", path)


def _covered(hidden: Iterable[str]) -> Iterator[str]:
    """Lay an empty folder or file over what is kept back of what was given; what is gone since shows nothing."""
    for path in map(Path, hidden):
        if path.is_dir():
            yield from ("--perms", "0555", "--tmpfs", str(path), "--remount-ro", str(path))
        elif path.exists():
            yield from ("--ro-bind", "/dev/null", str(path))


def _scratch(limits: Limits) -> Iterator[str]:
    size = str(limits.tmp_bytes)
    yield from ("--size", size, "--perms", "1777", "--tmpfs", TMP, "--perms", "0700", "--dir", HOME)
    yield from ("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm")  # noqa: S108 - inside


def _check(report: int, ended: Ended) -> None:
    """Raise where the launcher ended by itself before the command began; what a signal ended was running."""
    if ended.exit_code is not None and not has_begun(report):
        raise failed("bubblewrap", ended.stderr)
