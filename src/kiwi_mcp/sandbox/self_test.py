"""Run and cache self-tests, `BackendReport`, choose a backend for a level."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile
from typing import TypeAlias

import msgspec
from msgspec import Struct

from kiwi_mcp import __version__
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.isolation import Level, ResourceLimits, SandboxProfile
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.backend import Backend, Runner, SelfTest, never, unavailable
from kiwi_mcp.sandbox.levels import FOLDER, demands, offers, read_data

_NAMESPACES = ("ipc", "mnt", "net", "pid", "user")
_MEGABYTE = 1_048_576
_PATH = "/usr/bin:/bin"


def self_test(secret: str, *, is_grouped: bool) -> SelfTest:
    """Return the script as a process, with limits that are small enough to be run into quickly.

    A variable that steers the start of programs is among what it is given, because the launcher must not have it.
    """
    memory = (24 if is_grouped else 96) * _MEGABYTE
    limits = ResourceLimits(memory, cpus=0.5, pids=40, open_files=64, cpu_seconds=30, tmp_bytes=4 * _MEGABYTE)
    script = (FOLDER / "self_test.sh").read_text(encoding="utf-8")
    outside = [f"{name}={Path('/proc/self/ns', name).readlink()}" for name in _NAMESPACES]
    words = (secret, str(limits.tmp_bytes), str(limits.pids), "yes" if is_grouped else "no", *outside)
    spec = ProcessSpec(
        ("/bin/sh", "-c", script, "self_test", *words),
        cwd="/",
        env={"PATH": _PATH, "PROBE": "given", "LD_BIND_NOW": "1"},
        timeout=60.0,
    )
    return SelfTest(spec, SandboxProfile("restricted", limits=limits))


_Known: TypeAlias = dict[str, frozenset[str]]
"""The properties that self-tests have shown, by the key of backend and machine."""
_FILE = "isolation.json"
_LARGEST = 65_536
_GROUPED = frozenset({"mem_limit", "cpu_limit"})
_TRIES = 4
_NO_LIMITS = (
    "Kiwi cannot limit the memory and the processors of all processes of a tool together: it can make no control "
    "groups here, and its watchdog cannot see the processes. Start Kiwi where control groups are delegated to it. "
    "If you wrote the tool, sign it: `kiwi sign NAME`."
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
    could = [one for one in reports if wanted.requires <= _possible(one.backend)]
    raise unavailable(level, missing, lacks, [reason for report in could for reason in report.reasons])


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
        key = _key(backend)
        reports.append(_remembered(backend, known.get(key, frozenset())) or await _examined(backend, state, run))
        shown[key] = reports[-1].properties
    if shown != known:
        _write(state / _FILE, shown)
    return tuple(reports)


def recall(backends: Iterable[Backend], state: Path) -> tuple[BackendReport, ...] | None:
    """Return the report of each backend without running anything; None where a self-test is still to be run."""
    known = _read(state / _FILE)
    reports: list[BackendReport] = []
    for backend in backends:
        if (obstructed := _obstructed(backend)) is not None:
            reports.append(obstructed)
        elif (key := _key(backend)) in known:
            reports.append(_report_of(backend, known[key]))
        else:
            return None
    return tuple(reports)


def forget(state: Path) -> None:
    """Drop what was shown, because a launch failed: the next one shows it again, or says why not."""
    with suppress(OSError):
        (state / _FILE).unlink()


def _possible(backend: Backend) -> frozenset[str]:
    """Return every property that a backend can have on some machine."""
    offer = offers()[backend.name]
    return offer.provides | offer.proves


def _remembered(backend: Backend, properties: frozenset[str]) -> BackendReport | None:
    offer = offers()[backend.name]
    if backend.obstacles() or (offer.proves and not properties & offer.proves):
        return None
    return _report_of(backend, properties)


def _obstructed(backend: Backend) -> BackendReport | None:
    obstacles = backend.obstacles()
    return BackendReport(backend, frozenset(), obstacles) if obstacles else None


async def _examined(backend: Backend, state: Path, run: Runner) -> BackendReport:
    if (obstructed := _obstructed(backend)) is not None:
        return obstructed
    with _secret_in(state) as secret:
        test = backend.self_test(secret)
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
    for _ in range(_TRIES if test.profile.level == "restricted" else 1):
        with backend.wrap(test.spec, test.profile) as confined:
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


@contextmanager
def _secret_in(state: Path) -> Iterator[str]:
    """Make a file that no confined process may see: in the state folder, or where temporary files are."""
    with suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(prefix="secret-", dir=state if os.access(state, os.W_OK) else None) as file:
        yield file.name


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
