"""Standing: what each backend has been shown to do on this machine, and which of them a level gets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile

from kiwi_mcp import __version__
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.isolation import Jail, Level
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.sandbox.levels import FOLDER, demands, in_order, offers, read_data, words
from kiwi_mcp.sandbox.port import Backend, Runner, SelfTest
from kiwi_mcp.sandbox.refusals import unavailable

_FILE = "isolation.json"
_LARGEST = 65_536
_GROUPED = frozenset({"mem_limit", "cpu_limit"})
_TRIES = 4
_NO_GROUPS = (
    "Kiwi can make no control groups here, which bound the memory and processors of all processes of a tool together: "
    "start it as root or where control groups are delegated to it, or let the owner lower the level for this tool."
)


@dataclass(frozen=True, slots=True)
class Standing:
    """A backend, the properties it has here, and why it lacks others."""

    backend: Backend
    properties: frozenset[str]
    reasons: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        """Return what records and `doctor` show of it."""
        return {
            "backend": self.backend.name,
            "properties": list(in_order(self.properties)),
            "reasons": list(self.reasons),
        }


def choose(level: Level, standings: Sequence[Standing]) -> Standing:
    """Return the backend for a level, or refuse and say what is missing; never one that has less than it requires."""
    wanted = demands(level)
    able = [standing for standing in standings if wanted.requires <= standing.properties]
    if able:
        ordinary = [standing for standing in able if not offers()[standing.backend.name].is_last_resort]
        # Of those that give as much of what is preferred, the first one: they stand in order of what they cost.
        return max(ordinary or able, key=lambda standing: len(wanted.prefers & standing.properties))
    lacks = {standing.backend.name: list(in_order(wanted.requires - standing.properties)) for standing in standings}
    given = frozenset[str]().union(*(standing.properties for standing in standings))
    missing = [*(wanted.requires - given)] or min(lacks.values(), key=len)
    # The remedies of those that could give the level, were it not for this machine.
    could = [one for one in standings if wanted.requires <= offers()[one.backend.name].usual]
    raise unavailable(level, missing, lacks, [reason for standing in could for reason in standing.reasons])


@lru_cache(maxsize=256)
def policy_digest(jail: Jail) -> str:
    """Return a hash of how a process was held: its jail, and the data that say what its level means."""
    shown: JsonObject = {"jail": jail.to_json(), "data": [read_data(name) for name in ("levels", "backends", "base")]}
    return sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


async def examine(backends: Iterable[Backend], state: Path, run: Runner) -> tuple[Standing, ...]:
    """Return the standing of each backend, from the self-tests in the state folder or, where they are new, by running.

    The answers are kept by kernel, user and launcher; a changed one is a new machine.
    """
    known = _read(state / _FILE)
    standings: list[Standing] = []
    shown: dict[str, list[str]] = {}
    for backend in backends:
        if (spared := _spared(backend, standings)) is not None:
            standings.append(spared)
            continue
        key = _key(backend)
        standings.append(_remembered(backend, known.get(key)) or await _examined(backend, state, run))
        shown[key] = list(in_order(standings[-1].properties))
    if shown != known:
        _write(state / _FILE, shown)
    return tuple(standings)


def recall(backends: Iterable[Backend], state: Path) -> tuple[Standing, ...] | None:
    """Return the standing of each backend without running anything; None where a self-test is still to be run."""
    known = _read(state / _FILE)
    standings: list[Standing] = []
    for backend in backends:
        found = _spared(backend, standings) or _obstructed(backend) or _recalled(backend, known)
        if found is None:
            return None
        standings.append(found)
    return tuple(standings)


def forget(state: Path) -> None:
    """Drop what was shown, because a launch failed: the next one shows it again, or says why not."""
    with suppress(OSError):
        (state / _FILE).unlink()


def _spared(backend: Backend, others: Iterable[Standing]) -> Standing | None:
    """Return that a last resort is not tested, where another backend has all that the strictest level requires."""
    strictest = demands("restricted").requires
    if offers()[backend.name].is_last_resort and any(strictest <= one.properties for one in others):
        return Standing(backend, frozenset(), ("It is not needed here, and was not tested.",))
    return None


def _remembered(backend: Backend, properties: Json) -> Standing | None:
    offer = offers()[backend.name]
    if backend.obstacles() or (offer.proves and not words(properties) & offer.proves):
        return None
    return _standing(backend, properties)


def _recalled(backend: Backend, known: Mapping[str, Json]) -> Standing | None:
    """Return what a self-test has shown, also where that was nothing."""
    key = _key(backend)
    return _standing(backend, known[key]) if key in known else None


def _obstructed(backend: Backend) -> Standing | None:
    obstacles = backend.obstacles()
    return Standing(backend, frozenset(), obstacles) if obstacles else None


async def _examined(backend: Backend, state: Path, run: Runner) -> Standing:
    if (obstructed := _obstructed(backend)) is not None:
        return obstructed
    with _secret_in(state) as secret:
        test = backend.self_test(secret)
        if test is None:
            return _standing(backend, None)
        try:
            shown = await _shown(backend, test, run)
        except Unavailable as fault:
            return Standing(backend, frozenset(), (f"{fault.message} {fault.suggestion}",))
    return _standing(backend, [*shown])


async def _shown(backend: Backend, test: SelfTest, run: Runner) -> frozenset[str]:
    """Return what a self-test shows; one that bounds a group is repeated, as a busy machine may hide what holds."""
    shown: frozenset[str] = frozenset()
    for _ in range(_TRIES if test.jail.level == "restricted" else 1):
        with backend.wrap(test.spec, test.jail) as confined:
            before = confined.held_back()
            ended = await run(confined)
            confined.check(ended)
            # A process that gets little of a busy machine looks the same from inside, so that the kernel is asked.
            bounded = {"cpu_limit"} if confined.held_back() > before else set[str]()
        told = (frozenset(ended.stdout.decode(errors="replace").split()) - {"cpu_limit"}) | bounded
        # Only what a group bounds may be shown by one try and not by another: it is measured in time.
        shown = told | (shown & _GROUPED)
        if shown >= _GROUPED:
            break
    return shown


def _standing(backend: Backend, shown: Json) -> Standing:
    """Return the standing of a backend whose self-test has shown some properties."""
    offer = offers()[backend.name]
    properties = offer.provides | (words(shown) & offer.proves)
    unproved = offer.proves - properties
    reasons = [_NO_GROUPS] if unproved & _GROUPED else []
    if others := in_order(unproved - _GROUPED):
        reasons.append(
            f"The self-test of {backend.name} did not show {', '.join(others)} here: look whether a container "
            "or a security module restricts it."
        )
    return Standing(backend, properties, tuple(reasons))


def _key(backend: Backend) -> str:
    kernel = os.uname()
    told = (backend.name, backend.fingerprint(), kernel.release, kernel.version, kernel.machine, os.geteuid())
    test = (FOLDER / "self_test.sh").read_text(encoding="utf-8")
    return sha256(json.dumps([*told, __version__, test, policy_digest(Jail("restricted"))]).encode()).hexdigest()


@contextmanager
def _secret_in(state: Path) -> Iterator[str]:
    """Make a file that no confined process may see: in the state folder, or where temporary files are."""
    with suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(prefix="secret-", dir=state if os.access(state, os.W_OK) else None) as file:
        yield file.name


def _read(path: Path) -> Mapping[str, Json]:
    """Return what was shown before; nothing where the file is missing, damaged or not this user's own."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return {}
            return as_object(json.loads(file.read(_LARGEST)))
    except (OSError, ValueError, RecursionError):
        return {}


def _write(path: Path, found: Mapping[str, Sequence[str]]) -> None:
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    with suppress(OSError):  # a folder that cannot be written to costs a self-test at every start, and nothing else
        draft.write_text(json.dumps(found))
        draft.replace(path)
