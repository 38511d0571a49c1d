"""The backend `podman`: a container of the system's own files, for machines where bubblewrap is not to be had.

It needs no image: its root is a folder of empty places, on which the system's programs and what is given are mounted.
Nothing runs in it before what the engine made of its instructions has been read back from the kernel. It takes a few
tenths of a second to start, and gives no way to single hosts.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from platform import machine
from secrets import token_hex
from signal import SIGKILL, pidfd_send_signal

from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import Handover, Jail
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.bubblewrap import NOBODY
from kiwi_mcp.sandbox.cgroup import PREFIX, ROOT, remove, tops
from kiwi_mcp.sandbox.container_root import made_root, mount_words
from kiwi_mcp.sandbox.levels import demands
from kiwi_mcp.sandbox.limits import limit_process
from kiwi_mcp.sandbox.port import Confined, Ended, SelfTest
from kiwi_mcp.sandbox.prepared import Prepared, prepare
from kiwi_mcp.sandbox.profile import USER, base_profile
from kiwi_mcp.sandbox.read_back import shortcomings
from kiwi_mcp.sandbox.refusals import failed, ungrantable
from kiwi_mcp.sandbox.scratch import scratch_folder
from kiwi_mcp.sandbox.seccomp import is_supported
from kiwi_mcp.sandbox.seccomp_profile import profile
from kiwi_mcp.sandbox.self_test import self_test

_ENGINE = ("--storage-driver=vfs", "--events-backend=none", "--cgroup-manager=cgroupfs")
_ROOMS = (
    *("run", "--rm", "--interactive", "--log-driver=none", "--network=none", "--no-hosts", "--ipc=none"),
    *("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges"),
    *("--hostname=kiwi", f"--user={USER}:{USER}", "--preserve-fds=3"),
)
_MADE_UP = ("HOSTNAME", "TERM", "container")
"""Variables that the engine adds."""
# Numbers of descriptors: an engine passes on those from 3 on. The word to begin, the word that it is there, the result.
# A second process outside waits for the end of Kiwi, which nothing inside can reach.
_OUTSIDE = """
begin=$1 here=$2 life=$3 pid=$4 result=/dev/null; shift 4
[ ! "$KIWI_RESULT" ] || result=$KIWI_RESULT
exec 3<"/proc/self/fd/$begin" 4>"/proc/self/fd/$here" 5>"$result" 6<"/proc/self/fd/$life"
KIWI_RESULT=/dev/fd/5; export KIWI_RESULT
{ read -r _ <&6; kill -KILL "$(cat "$pid")"; } 3<&- 4>&- 5>&- >/dev/null 2>&1 &
"$@" 6<&-; code=$?
kill $!
exit $code
"""
_INSIDE = """
echo >&4 && read -r _ <&3 || exit 125
mkdir -m 700 "$HOME"; cd "$1" || exit 125
shift
exec 3<&- 4>&-
unset OLDPWD
env "$@"
"""
_MASTER = NOBODY + 1
"""Whom the administrator in a container is outside: likewise nobody, and not the one that processes run as."""


@dataclass(frozen=True, slots=True)
class Podman:
    """Starts a process through `podman`, which is None where the machine has none that can be trusted."""

    podman: str | None
    runtime: str | None
    """What podman is to start containers with; None for its own choice."""
    is_root: bool
    name: str = "podman"

    def obstacles(self) -> tuple[str, ...]:
        """Return that there is no such program, that Kiwi is not root, or that this machine has no filter."""
        checks = (
            (self.podman is None, "podman is missing, or others than root can change it."),
            (not self.is_root, "Kiwi uses podman only where it runs as root."),
            (not is_supported(machine()), f"There is no filter of system calls for {machine()}."),
        )
        return tuple(told for is_so, told in checks if is_so)

    def fingerprint(self) -> str:
        """Return the hash of the program, and what it starts containers with."""
        digest = sha256(Path(self.podman).read_bytes()).hexdigest() if self.podman else ""
        return f"{digest} {self.runtime} {machine()}"

    def self_test(self, secret: str) -> SelfTest | None:
        """Return a shell that tries what must not work."""
        return self_test(secret, is_grouped=True)

    @contextmanager
    def wrap(self, spec: ProcessSpec, jail: Jail) -> Iterator[Confined]:
        """Give the process as the engine's command, with a root made for it."""
        _refuse_secrets(spec)
        with ExitStack() as keep:
            made = prepare(spec, jail, keep)
            yield self._wrapped(spec, jail, made, keep)

    def _wrapped(self, spec: ProcessSpec, jail: Jail, made: Prepared, keep: ExitStack) -> Confined:
        place = keep.enter_context(scratch_folder())
        # Whoever is the administrator in the container has to find its root, and nobody else.
        os.chown(place, -1, _MASTER)
        place.chmod(0o710)
        root, owner = made_root(place, made), _owner(made)
        group = f"{PREFIX}{os.getpid()}-{token_hex(8)}"
        keep.callback(remove, [top / group for top in tops()])
        hall = _Hall(made, jail, owner, place / "pid", keep)
        engine = (str(self.podman), *_ENGINE, *_places(place), *_runtime(self.runtime, place))
        words = (*engine, *_ROOMS, *_held(jail, owner, group), *_filter(jail, place), *mount_words(place, made, jail))
        variables = [f"--env={name}" for name in (*made.passed, "KIWI_RUN", "KIWI_RESULT")]
        inside = ("/bin/sh", "-c", _INSIDE, "inside", made.folder, *_variables(made), *made.argv)
        run = (*words, *variables, f"--pidfile={hall.told_in}", "--rootfs", str(root), *inside)
        outside = ("/bin/sh", "-c", _OUTSIDE, "outside", *hall.numbers, str(hall.told_in), *run)
        return Confined(
            replace(spec, argv=outside, cwd="/", env=made.passed),
            Handover(hall.descriptors, owner, hall.watch),
            hall.check,
            hall.held_back,
        )


@dataclass(slots=True)
class _Hall:
    """Where a container waits until it has been looked at, and the end of all that is in it."""

    made: Prepared
    jail: Jail
    owner: int
    told_in: Path
    """The file in which the engine tells the number of the first process."""
    keep: ExitStack
    fault: str = "the container did not come to life"
    has_begun: bool = False
    descriptors: tuple[int, ...] = ()
    _here: int = field(init=False)
    _begin: int = field(init=False)

    def __post_init__(self) -> None:
        begins, self._begin = os.pipe()
        self._here, told = os.pipe()
        life, living = os.pipe()
        for end in (begins, told, self._here, life, living):
            self.keep.callback(os.close, end)
        self.keep.callback(self._turn_away)
        self.descriptors = (begins, told, life)
        for end in self.descriptors:
            os.fchown(end, self.owner, -1)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The descriptors in words, in the order in which the script outside takes them."""
        return tuple(map(str, self.descriptors))

    def watch(self, _: int) -> None:
        """Look at the container as soon as it says that it is there."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._here, self._look, loop)
        self.keep.callback(_stop_listening, loop, self._here)

    def check(self, ended: Ended) -> None:
        """Raise where the engine ended by itself before the process began; what a signal ended was being started."""
        if ended.exit_code is not None and not self.has_begun:
            raise failed("podman", f"{self.fault}. {ended.stderr.decode(errors='replace')}".encode())

    def held_back(self) -> int:
        """Return 1 once the share of the processors was read back: the group itself is gone with the container."""
        return int(self.has_begun)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._here)
        try:
            process = int(self.told_in.read_text())
            self._end_with_block(process)
            found = [*shortcomings(process, self.owner, self.made.grants, self.jail.limits, ROOT)]
            limit_process(process, self.jail.limits)
        except (OSError, ValueError, KeyError) as fault:
            found = [f"it cannot be looked at: {fault}"]
        if found:
            self.fault = "; ".join(found)
            self._turn_away()
        else:
            self.has_begun = True
            os.write(self._begin, b"\n")

    def _end_with_block(self, process: int) -> None:
        handle = os.pidfd_open(process)
        self.keep.callback(os.close, handle)
        self.keep.callback(_kill, handle)

    def _turn_away(self) -> None:
        """Let the container end: it reads that nobody will tell it to begin."""
        if self._begin >= 0:
            os.close(self._begin)
            self._begin = -1


def _refuse_secrets(spec: ProcessSpec) -> None:
    if hidden := sorted(name for name, value in spec.env.items() if "${" in value):
        raise IsolationUnavailable(
            f"podman writes the variables of a container to the disk, and {', '.join(hidden)} may hold a secret. "
            "The tool was not run.",
            suggestion="Install bubblewrap, which does not.",
            backend="podman",
        )


def _owner(made: Prepared) -> int:
    """Return whom the container's process is outside: the owner of what it may write, if that is one user."""
    owners = {grant.owner: grant.path for grant in made.granted if grant.is_writable}
    if 0 in owners:
        raise ungrantable(
            owners[0],
            "it belongs to root, and a container never has root's rights",
            "Install bubblewrap, give the folder to an ordinary user (`chown`), or start Kiwi as one.",
        )
    return next(iter(owners)) if len(owners) == 1 else NOBODY


def _places(place: Path) -> Iterator[str]:
    """Yield where the engine keeps what it knows of the container, so that nothing of it is left."""
    return (f"--{word}={place / 'engine' / word}" for word in ("root", "runroot", "tmpdir"))


def _runtime(runtime: str | None, place: Path) -> Sequence[str]:
    return () if runtime is None else (f"--runtime={runtime}", f"--runtime-flag=root={place / 'engine' / 'runtime'}")


def _held(jail: Jail, owner: int, group: str) -> Iterator[str]:
    limits = jail.limits
    for kind, other in (("uid", owner), ("gid", NOBODY)):
        yield from (f"--{kind}map=0:{_MASTER}:1", f"--{kind}map={USER}:{other}:1")
    yield from (f"--cgroup-parent=/{group}", f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}")
    yield from (f"--cpus={limits.cpus}", f"--pids-limit={limits.pids}")
    # Without these two the engine asks for more than root may have in a container.
    for word, most in (("nofile", limits.open_files), ("nproc", limits.pids)):
        yield f"--ulimit={word}={most}:{most}"


def _filter(jail: Jail, place: Path) -> Iterator[str]:
    file = place / "filter.json"
    file.write_text(json.dumps(profile(machine(), demands(jail.level).denied_calls)))
    yield f"--security-opt=seccomp={file}"
    yield f"--security-opt=mask={':'.join(('/sys', *base_profile().masked))}"


def _variables(made: Prepared) -> Iterator[str]:
    """Yield the words for `env` that take away what the engine added, and set what it must not have had itself."""
    for name in _MADE_UP:
        if name not in made.passed:
            yield from ("-u", name)
    yield from (f"{name}={value}" for name, value in made.inside.items())


def _kill(handle: int) -> None:
    with suppress(ProcessLookupError):
        pidfd_send_signal(handle, SIGKILL)


def _stop_listening(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    with suppress(RuntimeError):  # the loop has been closed
        loop.remove_reader(descriptor)
