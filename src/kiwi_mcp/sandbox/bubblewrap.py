"""The backend `bubblewrap`: a file system, processes, network and names of its own, and a filter of system calls.

The launcher is the system's own, is started by a user without rights and with nothing in its environment but what the
confined process gets. What it is to do comes through a pipe that ends only when the process has been put under its
limits, so nothing runs before. Started as root, Kiwi stages what it grants and becomes another user first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from platform import machine

from kiwi_mcp.domain.errors import CommandMissing, TooLarge
from kiwi_mcp.domain.isolation import Handover, Jail, Limits
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox import staging
from kiwi_mcp.sandbox.cgroup import Group, Groups
from kiwi_mcp.sandbox.grants import Opened, open_grants
from kiwi_mcp.sandbox.levels import demands
from kiwi_mcp.sandbox.limits import limiting
from kiwi_mcp.sandbox.port import Confined, Ended, SelfTest
from kiwi_mcp.sandbox.profile import HOME, TMP, USER, Profile, base_profile
from kiwi_mcp.sandbox.programs import roots_of
from kiwi_mcp.sandbox.protected import shielded
from kiwi_mcp.sandbox.refusals import failed, ungrantable
from kiwi_mcp.sandbox.seccomp import filter_program, is_supported
from kiwi_mcp.sandbox.self_test import SCRIPT, test_limits
from kiwi_mcp.sandbox.variables import divided

NOBODY = 65_534
"""The user that sandboxes run as when Kiwi itself is started as root."""
_PIPE = 65_536
"""What a pipe holds before anybody reads it, in bytes."""
_STARTED = b'"exit-code"'
"""What the launcher reports at the end, if it got as far as starting the command."""
_INSTALL = "install bubblewrap (`apt-get install bubblewrap`, `dnf install bubblewrap`)"


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Starts a process through `bwrap`; a program is None where the machine has none that can be trusted."""

    bwrap: str | None
    prlimit: str | None
    nsenter: str | None
    is_root: bool
    groups: Groups | None = None
    owner_map: int | None = None
    """A user namespace in which root is the unprivileged user, for what is granted by root."""
    name: str = "bubblewrap"

    def obstacles(self) -> tuple[str, ...]:
        """Return which programs are missing, and whether this machine has a filter."""
        missing = [f"bubblewrap is missing: {_INSTALL}."] if self.bwrap is None else []
        missing += ["`prlimit` is not installed: install util-linux."] if self.prlimit is None else []
        if self.is_root and self.nsenter is None:
            missing.append(
                "Kiwi runs as root and `nsenter` is not installed: install util-linux, or run as another user."
            )
        if not is_supported(machine()):
            missing.append(f"There is no filter of system calls for {machine()}: run the tool on x86_64 or aarch64.")
        return tuple(missing)

    def fingerprint(self) -> str:
        """Return the hash of the launcher, and what it stands on."""
        digest = sha256(Path(self.bwrap).read_bytes()).hexdigest() if self.bwrap else ""
        return f"{digest} {self.prlimit} {self.nsenter} {self.groups is not None} {machine()}"

    def self_test(self, secret: str) -> SelfTest | None:
        """Return a shell that tries what must not work."""
        hosts = [f"{name}={os.readlink(f'/proc/self/ns/{name}')}" for name in ("ipc", "mnt", "net", "pid", "user")]
        limits = test_limits(is_grouped=self.groups is not None)
        spec = ProcessSpec(
            ("/bin/sh", "-c", SCRIPT, "probe", secret, str(limits.tmp_bytes), str(limits.pids), *hosts),
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "PROBE": "given", "LD_BIND_NOW": "1"},
            timeout=60.0,
        )
        return SelfTest(spec, Jail("restricted" if self.groups else "sandboxed", limits=limits))

    @contextmanager
    def confine(self, spec: ProcessSpec, jail: Jail) -> Iterator[Confined]:
        """Give the process as the launcher's command, with everything the launcher needs open."""
        with ExitStack() as keep:
            yield self._confined(spec, jail, keep)

    def _confined(self, spec: ProcessSpec, jail: Jail, keep: ExitStack) -> Confined:
        assert self.bwrap is not None  # noqa: S101 - a backend with obstacles is never chosen
        assert self.prlimit is not None  # noqa: S101 - likewise
        profile, (passed, inside) = base_profile(), divided(spec.env)
        program = _program(spec)
        needed = [root for root in roots_of(program) if not profile.covers(root)]
        grants = open_grants(jail, needed, keep)
        grants = (*grants, *shielded(grants, profile, keep))
        words = _Words(keep)
        words.add(*_ROOMS, *_base(profile, words))
        words.add(*_scratch(jail.limits))
        owner = self._user(grants)
        entrance = self._give(grants, words, owner, keep)
        for name, value in inside.items():
            words.add("--setenv", name, value)
        words.add("--chdir", _folder(spec, grants))
        status = words.report_to()
        words.filter_by(jail)
        group = self._group(jail, keep)
        argv = (
            self.bwrap,
            "--args",
            str(words.pipe),
            "--",
            *limiting(self.prlimit, jail.limits, counts_processes=True),
        )
        return Confined(
            replace(spec, argv=(*entrance, *argv, program, *spec.argv[1:]), cwd="/", env=passed),
            Handover(words.descriptors(), owner, partial(words.release, group)),
            partial(_check, status),
        )

    def _user(self, grants: Sequence[Opened]) -> int | None:
        """Return the user that a sandbox of root's becomes: the owner of what it may write, if that is one user."""
        if not self.is_root:
            return None
        owners = {grant.owner for grant in grants if grant.is_writable}
        if 0 in owners and self.owner_map is None:
            path = next(grant.path for grant in grants if grant.is_writable and grant.owner == 0)
            raise ungrantable(
                path,
                "it belongs to root, and a sandbox never has root's rights",
                "Start Kiwi as an ordinary user, or give the folder to one (`chown`).",
            )
        return owners.pop() if len(owners) == 1 and 0 not in owners else NOBODY

    def _give(self, grants: Sequence[Opened], words: _Words, owner: int | None, keep: ExitStack) -> tuple[str, ...]:
        """Lay the grants into the sandbox, and return the command by which the launcher is entered from root."""
        if owner is None:
            for grant in grants:
                words.add(
                    "--bind-fd" if grant.is_writable else "--ro-bind-fd", words.lend(grant.descriptor), grant.path
                )
            words.add("--remount-ro", "/")
            return ()
        table = staging.stage(grants, self.owner_map if owner == NOBODY else None)
        keep.callback(os.close, table)
        for index, grant in enumerate(grants):
            words.add("--bind" if grant.is_writable else "--ro-bind", staging.staged_path(index), grant.path)
        words.add("--remount-ro", "/")
        # By Kiwi's own descriptor and not an inherited one: nothing of it may be left open for the process.
        place = f"/proc/{os.getpid()}/fd/{table}"
        return (str(self.nsenter), f"--mount={place}", f"--setuid={owner}", f"--setgid={owner}", "--")

    def _group(self, jail: Jail, keep: ExitStack) -> Group | None:
        return keep.enter_context(self.groups.limited(jail.limits)) if self.groups is not None else None


_ROOMS = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--hostname", "kiwi", "--uid", USER, "--gid", USER),
    *("--proc", "/proc", "--dev", "/dev"),
)


class _Words:
    """The launcher's own words, which it reads from a pipe, and the descriptors they speak of."""

    def __init__(self, keep: ExitStack) -> None:
        self._keep = keep
        self._words: list[str] = []
        self._lent: list[int] = []
        self.pipe, self._writing = os.pipe()
        self._is_open = True
        keep.callback(os.close, self.pipe)
        keep.callback(self._end)

    def add(self, *words: str) -> None:
        """Say something to the launcher."""
        self._words += words

    def lend(self, descriptor: int) -> str:
        """Give the launcher a descriptor, which it closes before the command, and return its number."""
        self._lent.append(descriptor)
        return str(descriptor)

    def file_of(self, content: bytes) -> str:
        """Give the launcher some bytes as a file in memory, and return its number."""
        descriptor = os.memfd_create("kiwi")
        self._keep.callback(os.close, descriptor)
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return self.lend(descriptor)

    def report_to(self) -> int:
        """Let the launcher tell how far it came, and return where."""
        number = self.file_of(b"")
        self.add("--json-status-fd", number)
        return int(number)

    def filter_by(self, jail: Jail) -> None:
        """Let the launcher filter system calls, from its own first process inside on."""
        denied = ("memfd_create",) if "memfd" in demands(jail.level).denies else ()
        self.add("--seccomp", self.file_of(filter_program(machine(), denied=denied)))

    def descriptors(self) -> tuple[int, ...]:
        """Return all that the launcher must inherit."""
        said = sum(len(os.fsencode(word)) + 1 for word in self._words)
        if said > _PIPE:
            raise TooLarge("The list of paths and variables for the sandbox", size=said, limit=_PIPE)
        return (self.pipe, *self._lent)

    def release(self, group: Group | None, pid: int) -> None:
        """Put the launcher under its limits, and only then tell it what to do."""
        if group is not None:
            group.add(pid)
        os.write(self._writing, b"".join(os.fsencode(word) + b"\0" for word in self._words))
        self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._writing)


def _base(profile: Profile, words: _Words) -> Iterator[str]:
    for path in profile.readable:
        yield from ("--ro-bind", path, path)
    for path, target in profile.links.items():
        yield from ("--symlink", target, path)
    for path, content in profile.files.items():
        yield from ("--perms", "0644", "--file", words.file_of(content), path)
    for path in profile.masked:
        yield from ("--ro-bind", "/dev/null", path)


def _scratch(limits: Limits) -> Iterator[str]:
    size = str(limits.tmp_bytes)
    yield from ("--size", size, "--perms", "1777", "--tmpfs", TMP, "--perms", "0700", "--dir", HOME)
    yield from ("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev")  # noqa: S108 - inside


def _program(spec: ProcessSpec) -> str:
    """Return the program's path, with the folders on the way made real, as it lies inside as well."""
    folders = [folder for folder in spec.env.get("PATH", os.defpath).split(":") if folder.startswith("/")]
    command = spec.argv[0]
    found = os.path.join(spec.cwd, command) if "/" in command else shutil.which(command, path=":".join(folders))
    if found is None or not os.path.isfile(found):
        raise CommandMissing(command, needed_by="the call")
    return str(Path(os.path.realpath(Path(found).parent), Path(found).name))


def _folder(spec: ProcessSpec, grants: Sequence[Opened]) -> str:
    """Return where the process starts: where it was to, if that was granted, else in its home."""
    around = {spec.cwd, *map(str, Path(spec.cwd).parents)}
    return spec.cwd if any(grant.path in around for grant in grants if grant.is_folder) else HOME


def _check(status: int, ended: Ended) -> None:
    """Raise where the launcher ended by itself before the command began; what a signal ended was running."""
    if ended.exit_code is not None and _STARTED not in os.pread(status, _PIPE, 0):
        raise failed("bubblewrap", ended.stderr)
