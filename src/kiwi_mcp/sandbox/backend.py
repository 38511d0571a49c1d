"""Sandbox backends: the port, self-tests and their reports, the choice for a level, errors with remedies."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile
from typing import IO, Protocol, TypeAlias

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp import __version__
from kiwi_mcp.domain.errors import IsolationUnavailable, Unavailable
from kiwi_mcp.domain.isolation import Handover, Level, ProcessExit, SandboxProfile
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.levels import FOLDER, demands, meaning, offers, read_data

_REMEDIES = {
    "No permissions to creat": "This system does not let ordinary users make user namespaces. On Ubuntu, give "
    "bubblewrap an AppArmor profile that allows `userns`; in a container, allow `clone` and `unshare` with "
    "CLONE_NEWUSER in its seccomp profile; on Debian, set `kernel.unprivileged_userns_clone=1`.",
    "nesting depth or": "The number of namespaces is limited here. Raise `user.max_user_namespaces` and its kin, or "
    "start Kiwi outside of the sandbox that it runs in.",
    "Can't mount proc": "Parts of /proc are masked here, as container engines do, so no new one can be mounted. Start "
    "the container with an unmasked /proc, or run Kiwi outside of it.",
    "Unknown option": "This bubblewrap is too old. Install the security update of August 2024, with which it learned "
    "`--bind-fd`, or a newer release.",
    "Race condition": "A granted folder was exchanged while the process was being started. Look at who does so.",
    "setting up uid map": "The user namespace could not be given its users. Look whether another sandbox or security "
    "module restricts it.",
}
_OTHERWISE = "Run it again: the sandbox is tested anew first, and `kiwi doctor` tells then what was found."
_Known: TypeAlias = dict[str, frozenset[str]]
"""The properties that self-tests have shown, by the key of backend and machine."""
_FILE = "isolation.json"
_LARGEST = 65_536
_GROUPED = frozenset({"mem_limit", "cpu_limit"})
_CPUS = (0.5, 0.5, 0.2, 0.05)
"""The share of a processor at each try of a self-test: on a busy machine no process gets as much as a large one."""
_NO_LIMITS = (
    "Kiwi cannot limit the memory and the processors of all processes of a tool together: it can make no control "
    "groups here, and its watchdog cannot see the processes. Start Kiwi where control groups are delegated to it. "
    "If you wrote the tool, sign it: `kiwi sign NAME`."
)


def began(_: ProcessExit) -> None:
    """Take it that a process without a launcher has begun: nothing stands between its start and itself."""


def never() -> int:
    """Return 0: a process without a CPU limit is never throttled."""
    return 0


def always() -> bool:
    """Return True: a process that writes to no folder cannot lose what protects files there."""
    return True


class Launch(Struct, frozen=True):
    """A process that is ready to start, confined; it lasts as long as the block that gave it."""

    spec: ProcessSpec
    handover: Handover = field(default_factory=Handover)
    check: Callable[[ProcessExit], None] = began
    """Raises where it was not the process that failed but what should have confined it, so that nothing ran."""
    throttle_count: Callable[[], int] = never
    """Counts how often the kernel stopped its processes because their share of the processors was used up."""
    watch: Callable[[], str] | None = None
    """Says why its processes have to be stopped, an empty text while they may continue; None if the kernel stops them.

    It is called every 50 ms.
    """
    is_whole: Callable[[], bool] = always
    """Whether settings of other programs, in the folders that it may write to, are still protected from it."""


class SelfTest(Struct, frozen=True):
    """A process that prints the name of each property that holds in its sandbox, within `spec.timeout`."""

    spec: ProcessSpec
    profile: SandboxProfile


class Backend(Protocol):
    """Turns a process into the same process, confined."""

    @property
    def name(self) -> str:
        """The word for it in the data, which is also the name of its file."""

    @property
    def limited_by(self) -> str:
        """What limits all processes of a tool together: `cgroup` or `watchdog`; empty if nothing does."""

    def obstacles(self) -> tuple[str, ...]:
        """Return what prevents this backend from working here, each with its remedy; empty if it may work."""

    def fingerprint(self) -> str:
        """Return the inputs of the self-test's result, besides the kernel and the user."""

    def self_test(self, secret: str) -> SelfTest | None:
        """Return the process that tests the backend here, or None; it must not be able to see the file `secret`."""

    def wrap(self, spec: ProcessSpec, profile: SandboxProfile) -> AbstractContextManager[Launch]:
        """Return the process confined; what was opened for it is closed when the block ends."""


Runner: TypeAlias = Callable[[Launch], Awaitable[ProcessExit]]
"""Runs a confined process to its end: what a primitive does, handed down, since only primitives start processes."""


class NoSandbox:
    """Gives a process as it came."""

    name = "none"
    limited_by = ""

    def obstacles(self) -> tuple[str, ...]:
        """Return nothing: it works everywhere."""
        return ()

    def fingerprint(self) -> str:
        """Return nothing: there is nothing to show."""
        return ""

    def self_test(self, secret: str) -> SelfTest | None:  # noqa: ARG002 - the port gives every backend the same arguments
        """Return None: what it provides, the primitive does, wherever it runs."""
        return None

    @contextmanager
    def wrap(self, spec: ProcessSpec, profile: SandboxProfile) -> Iterator[Launch]:  # noqa: ARG002 - as above
        """Yield the process unchanged."""
        yield Launch(spec)


def failed(backend: str, said: bytes) -> IsolationUnavailable:
    """Return the error of a launcher that ended before the tool began."""
    complaint = said.decode(errors="replace").strip()[-400:]
    return IsolationUnavailable(
        f"The sandbox ({backend}) failed, not the tool, which was not run: {complaint or 'it ended without a word'}.",
        suggestion=next((response for sign, response in _REMEDIES.items() if sign in complaint), _OTHERWISE),
        backend=backend,
        launcher=complaint,
    )


def ungrantable(path: str, reason: str, suggestion: str) -> IsolationUnavailable:
    """Return the refusal of a path that cannot be given to a confined process."""
    return IsolationUnavailable(
        f"The path {path!r} cannot be given to a sandbox: {reason}.", suggestion=suggestion, path=path
    )


class BackendReport(Struct, frozen=True):
    """A backend, the properties it has here, and why it lacks others."""

    backend: Backend
    properties: frozenset[str]
    reasons: tuple[str, ...] = ()


def choose(level: Level, reports: Sequence[BackendReport]) -> BackendReport:
    """Return the backend for a level, or refuse and say what is missing; never one that has less than it requires."""
    wanted = demands(level)
    able = [report for report in reports if wanted.requires <= report.properties]
    if able:
        # Of those that give as much of what is preferred, the first one: they stand in order of what they cost.
        return max(able, key=lambda report: len(wanted.prefers & report.properties))
    lacks = {report.backend.name: sorted(wanted.requires - report.properties) for report in reports}
    given = frozenset[str]().union(*(report.properties for report in reports))
    missing = [*(wanted.requires - given)] or min(lacks.values(), key=len)
    # The remedies of those that could give the level, were it not for this machine.
    known = offers()
    could = [
        one for one in reports if wanted.requires <= known[one.backend.name].provides | known[one.backend.name].proves
    ]
    reasons = dict.fromkeys(reason for report in could for reason in report.reasons)
    lacking = sorted(missing)
    raise IsolationUnavailable(
        f"Isolation level {level!r} needs {', '.join(lacking)}, which nothing on this machine gives "
        f"({'; '.join(map(meaning, lacking))}). The tool was not run.",
        suggestion=" ".join(reasons) or "Let the owner choose another level for this tool.",
        level=level,
        missing=[*lacking],
        backends=lacks,
    )


@lru_cache(maxsize=256)
def policy_digest(profile: SandboxProfile) -> str:
    """Return a hash of the isolation of a process: its profile, and the data that define its level."""
    shown: JsonObject = {
        "jail": profile.to_json(),
        "data": [read_data(name) for name in ("levels", "backends", "base")],
    }
    return sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


async def examine(backends: Iterable[Backend], state: Path, run: Runner) -> tuple[BackendReport, ...]:
    """Return the report of each backend, from the self-tests in the state folder or, where they are new, by running.

    The answers are kept by kernel, user and launcher; a changed one is a new machine.
    """
    known = _read(state / _FILE)
    reports: list[BackendReport] = []
    shown: dict[str, frozenset[str]] = {}
    for backend in backends:
        key, offer = _key(backend), offers()[backend.name]
        properties = known.get(key, frozenset())
        is_new = bool(backend.obstacles()) or (offer.proves and not properties & offer.proves)
        reports.append(await _examined(backend, state, run) if is_new else _report_of(backend, properties))
        shown[key] = reports[-1].properties
    if shown != known:
        _write(state / _FILE, shown)
    return tuple(reports)


def recall(backends: Iterable[Backend], state: Path) -> tuple[BackendReport, ...] | None:
    """Return the report of each backend without running anything; None where a self-test is still to be run."""
    known = _read(state / _FILE)
    reports: list[BackendReport] = []
    for backend in backends:
        if obstacles := backend.obstacles():
            reports.append(BackendReport(backend, frozenset(), obstacles))
        elif (key := _key(backend)) in known:
            reports.append(_report_of(backend, known[key]))
        else:
            return None
    return tuple(reports)


def forget(state: Path) -> None:
    """Drop what was shown, because a launch failed: the next one shows it again, or says why not."""
    with suppress(OSError):
        (state / _FILE).unlink()


async def _examined(backend: Backend, state: Path, run: Runner) -> BackendReport:
    if obstacles := backend.obstacles():
        return BackendReport(backend, frozenset(), obstacles)
    with _secret_in(state) as secret:
        test = backend.self_test(secret.name)
        if test is None:
            return _report_of(backend, frozenset())
        try:
            shown = await _shown(backend, test, run)
        except Unavailable as fault:
            return BackendReport(backend, frozenset(), (f"{fault.message} {fault.suggestion}",))
    return _report_of(backend, shown)


async def _shown(backend: Backend, test: SelfTest, run: Runner) -> frozenset[str]:
    """Return what a self-test shows; one that bounds a group is repeated, as a busy machine may hide what holds."""
    shown: frozenset[str] = frozenset()
    for cpus in _CPUS if test.profile.level == "restricted" else _CPUS[:1]:
        profile = replace(test.profile, limits=replace(test.profile.limits, cpus=cpus))
        with backend.wrap(test.spec, profile) as confined:
            before = confined.throttle_count()
            ended = await run(confined)
            confined.check(ended)
            response = frozenset(ended.stdout.decode(errors="replace").split())
            if confined.throttle_count is not never:
                # A process that gets little of a busy machine looks the same from inside, so that the kernel is asked.
                response = response - {"cpu_limit"} | ({"cpu_limit"} if confined.throttle_count() > before else set())
            if ended.stopped:  # the last thing that the test does is to use more memory than it may
                response |= {"mem_limit"}
        # Only what a group bounds may be shown by one try and not by another: it is measured in time.
        shown = response | (shown & _GROUPED)
        if shown >= _GROUPED:
            break
    return shown


def _report_of(backend: Backend, shown: frozenset[str]) -> BackendReport:
    """Return the report of a backend from the properties that its self-test has shown."""
    offer = offers()[backend.name]
    properties = offer.provides | (shown & offer.proves)
    unproved = offer.proves - properties
    reasons = [_NO_LIMITS] if unproved & _GROUPED else []
    if others := sorted(unproved - _GROUPED):
        reasons.append(
            f"The self-test of {backend.name} did not show {', '.join(others)} here: look whether a container "
            "or a security module restricts it."
        )
    return BackendReport(backend, properties, tuple(reasons))


def _key(backend: Backend) -> str:
    kernel = os.uname()
    response = (backend.name, backend.fingerprint(), kernel.release, kernel.version, kernel.machine, os.geteuid())
    test = (FOLDER / "self_test.sh").read_text(encoding="utf-8")
    return sha256(
        json.dumps([*response, __version__, test, policy_digest(SandboxProfile("restricted"))]).encode()
    ).hexdigest()


def _secret_in(state: Path) -> AbstractContextManager[IO[bytes]]:
    """Make a file that no confined process may see: in the state folder, or where temporary files are."""
    with suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
    return NamedTemporaryFile(prefix="secret-", dir=state if os.access(state, os.W_OK) else None)


def _read(path: Path) -> _Known:
    """Return what was shown before; nothing where the file is missing, damaged or not this user's own."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return {}
            return msgspec.json.decode(file.read(_LARGEST), type=_Known)
    except (OSError, ValueError, RecursionError):
        return {}


def _write(path: Path, found: _Known) -> None:
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    with suppress(OSError):  # a folder that cannot be written to costs a self-test at every start, and nothing else
        draft.write_text(json.dumps({key: sorted(properties) for key, properties in found.items()}))
        draft.replace(path)
