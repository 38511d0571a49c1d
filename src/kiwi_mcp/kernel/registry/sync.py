"""Copies from one registry to another: all that is new, or one version with everything it stands on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.errors import (
    ArtifactRefused,
    Denied,
    Invalid,
    InvalidRequest,
    NamespaceDenied,
    NotFound,
    VersionConflict,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    START,
    Actor,
    Cursor,
    Event,
    Published,
    Release,
    VersionName,
    closure_below,
    closure_of,
)
from kiwi_mcp.kernel.registry.port import Remote
from kiwi_mcp.kernel.registry.told import Told, Wanted
from kiwi_mcp.manifest.sheets import load_sheets
from kiwi_mcp.store.order import MAX_LINKS, order

_FIRST_BATCH, _LARGEST_BATCH = 32, 500
Hashes: TypeAlias = tuple[str, str]
"""The digest of a version, and its closure."""
Admit: TypeAlias = Callable[[Sequence[Release]], Awaitable[None]]
"""Refuses versions, all of them where it refuses one."""
Sieve: TypeAlias = Callable[[Sequence[Release]], Mapping[VersionName, str]]
"""Gives those of some versions that are kept out, each with the reason."""

_BATCH_BYTES = 16_000_000
"""About how many bytes of files one batch holds: after a larger one, the next has fewer versions."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did."""

    new: tuple[VersionName, ...] = ()
    unchanged: int = 0
    marked: int = 0
    left_out: tuple[str, ...] = ()
    """What was not copied although it was asked for, each with the reason."""
    cursor: Cursor = START
    """The last event that was read: the next sync begins after it."""


@dataclass(slots=True)
class _Gathered:
    """What was read of a source: versions in the order of writing, and what has to stay behind, with the reason."""

    releases: list[Release] = field(default_factory=list)
    hashes: dict[VersionName, Hashes] = field(default_factory=dict)
    barred: dict[VersionName, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Writing:
    """What was written to a target so far, and what it refused."""

    target: Remote
    new: list[VersionName] = field(default_factory=list)
    barred: dict[VersionName, str] = field(default_factory=dict)
    refusal: Denied | None = None
    denied: dict[str, str] = field(default_factory=dict)
    """Namespaces to which nothing may be written, with the reason."""

    async def write(self, releases: Sequence[Release]) -> Sequence[VersionName]:
        """Write versions, but for the namespaces that the target refuses, and return the names of those it holds."""
        ready = [release for release in releases if not self._is_barred(release)]
        if not ready:
            return ()
        try:
            published = await self.target.write(ready, ())
        except Denied as refusal:
            if not _is_about_namespaces(refusal):
                raise
            spaces = [[*group] for _, group in groupby(ready, key=lambda release: release.name.namespace)]
            if len(spaces) == 1:
                self.refusal = refusal
                self.denied[ready[0].name.namespace] = refusal.message
                self.barred |= {release.name: refusal.message for release in ready}
                return ()
        else:
            self.new += [one.name for one in published if one.is_new]
            return [release.name for release in ready]
        # Whichever namespace it was: those that stand side by side, executors first, are tried for themselves.
        return [name for space in spaces for name in await self.write(space)]

    def _is_barred(self, release: Release) -> bool:
        pin, name = release.executor, release.name
        if name.namespace in self.denied:
            self.barred[name] = self.denied[name.namespace]
        elif pin and pin.name in self.barred:
            self.barred[name] = f"it stands on {pin.name}, and {self.barred[pin.name]}"
        return name in self.barred


def everything(_: VersionName) -> bool:
    """Choose every version."""
    return True


def cursor_name(remote: Remote, actor: Actor, *, with_private: bool = False) -> str:
    """Return the name under which a cursor is kept: one for each thing that a pull may leave out or not see."""
    return f"pull as {', '.join(sorted(actor.namespaces))}{' with private' if with_private else ''}: {remote.key}"


async def copy(
    source: Remote,
    target: Remote,
    *,
    after: Cursor = START,
    only: Callable[[VersionName], bool] = everything,
    with_private: bool = False,
    report: Report = silent,
    sieve: Sieve | None = None,
) -> SyncReport:
    """Replay what happened in a source since an event: add what the target lacks, and say again what was said.

    Nothing is written if any version is there already with another closure. What ships with Kiwi is not copied, nor
    what `sieve` keeps out.
    """
    held = Told.by(await target.events())
    # A target that holds nothing is not the one that was written to before.
    events = await _events(source, after if held.versions else START)
    if not events:
        return SyncReport(cursor=after)
    told = Told.by(events)

    def is_meant(name: VersionName) -> bool:
        return name.namespace != BUILTIN_NAMESPACE and only(name) and (with_private or not told.is_private(name))

    wanted = {name: hashes for name, hashes in _hashes(told).items() if is_meant(name)}
    here = _hashes(held)
    _refuse_conflicts(wanted, here)
    missing = [name for name in wanted if name not in here]
    writing = _Writing(target)
    async for gathered in _batches(source, missing, wanted, here, with_private=with_private):
        writing.barred |= gathered.barred
        if sieve is not None:
            writing.barred |= await asyncio.to_thread(sieve, gathered.releases)
        written = await writing.write(gathered.releases)
        here |= {name: hashes for name, hashes in gathered.hashes.items() if name in written}
        report(Progress("Copying versions", done=len(writing.new), total=len(missing)))
    marks = [mark for mark in _news(told, held, here) if is_meant(mark.name)]
    unsaid = await _say(target, marks)
    if writing.refusal is not None and len(missing) == len(wanted) and not writing.new:
        raise writing.refusal  # nothing of it may be written there, which is more than leaving something out
    return SyncReport(
        new=tuple(writing.new),
        unchanged=len(wanted) - len(missing),
        marked=len(marks) - len(unsaid),
        left_out=(*(f"{name}: {why}" for name, why in writing.barred.items() if is_meant(name)), *unsaid),
        cursor=Cursor(events[-1].seq, events[-1].hash),
    )


async def pull(
    source: Remote,
    target: Remote,
    wanted: Wanted,
    *,
    namespaces: Sequence[str],
    report: Report = silent,
    admit: Admit | None = None,
) -> Sequence[Published]:
    """Copy one version and all that it stands on, the version last; on any fault nothing is written.

    `admit` refuses what may not come in.
    """
    told, held = await told_of(source, wanted), await told_of(target, wanted)
    name = wanted.choose(told, namespaces)
    if name.namespace == BUILTIN_NAMESPACE:
        raise InvalidRequest(
            f"{name} comes with Kiwi, and is not taken from elsewhere.",
            suggestion="Use the one that is here: `kiwi list --namespace kiwi`.",
        )
    asked = {name: (told.versions[name], told.closures[name])}
    _refuse_conflicts(asked, _hashes(held))
    # Read even where the target has it: who pulls wants to know that it is still what it was.
    gathered = await _gather(source, asked, {}, with_private=True)
    if gathered.barred:
        raise NotFound(
            f"{name} cannot be had whole: {'; '.join(f'{one}: {why}' for one, why in gathered.barred.items())}.",
            suggestion="Ask whoever published it to publish what it stands on where you can see it.",
        )
    if admit is not None:
        await admit(gathered.releases)
    report(Progress(f"{name} and what it stands on", done=len(gathered.releases)))
    marks = [mark for mark in _news(told, held, asked) if mark.op == "visibility" or mark.name == name]
    return await target.write(gathered.releases, marks)


async def told_of(remote: Remote, wanted: Wanted) -> Told:
    """Return what a remote tells of the items that may be meant, and no more than that where their name is known."""
    return Told.by(await (remote.history(wanted.tool_id) if wanted.tool_id else remote.events()))


async def _events(source: Remote, after: Cursor) -> Sequence[Event]:
    """Return what happened since an event, or everything, where that event says less than it should."""
    if not after.seq:
        return await source.events()
    last, *events = await source.events(after.seq - 1) or (None,)
    # A log without the very event that was read last is another one: somebody made the source anew.
    is_same = last is not None and (last.seq, last.hash) == after
    # What was private when it was passed over may be so no longer, and its publishing lies before the cursor.
    is_revealed = any(event.op == "visibility" and event.visibility != "private" for event in events)
    return events if is_same and not is_revealed else await source.events()


def _hashes(told: Told) -> dict[VersionName, Hashes]:
    return {name: (digest, told.closures[name]) for name, digest in told.versions.items()}


def _refuse_conflicts(wanted: Mapping[VersionName, Hashes], held: Mapping[VersionName, Hashes]) -> None:
    if conflicts := [str(name) for name, hashes in wanted.items() if held.get(name, hashes) != hashes]:
        raise VersionConflict(conflicts)


def _is_about_namespaces(refusal: Denied) -> bool:
    """Whether a target refuses a namespace, and perhaps not all; a server says so in its answer."""
    return NamespaceDenied.code in {refusal.code, refusal.details.get("refusal")}


async def _say(target: Remote, marks: Sequence[Event]) -> Sequence[str]:
    """Say again what was said, and return what the target will not have, each with the reason: the rest is said."""
    if not marks:
        return ()
    try:
        await target.write((), marks)
    except (Invalid, NotFound, Denied) as refusal:
        if isinstance(refusal, Denied) and not _is_about_namespaces(refusal):
            raise
        if len(marks) == 1:
            return (f"{marks[0].name} ({marks[0].op}): {refusal.message}",)
    else:
        return ()
    half = len(marks) // 2
    return (*await _say(target, marks[:half]), *await _say(target, marks[half:]))


def _news(told: Told, held: Told, digests: Iterable[VersionName]) -> Iterator[Event]:
    """Yield what a target has not heard yet of the versions it holds."""
    names = {*digests}
    items = {(name.namespace, name.tool_id) for name in names}
    for mark in told.marks.values():
        name = mark.name
        is_here = (name.namespace, name.tool_id) in items if mark.op == "visibility" else name in names
        if is_here and held.is_news(mark):
            yield mark


async def _batches(
    source: Remote,
    names: Sequence[VersionName],
    wanted: Mapping[VersionName, Hashes],
    held: Mapping[VersionName, Hashes],
    *,
    with_private: bool,
) -> AsyncIterator[_Gathered]:
    """Yield versions with what they stand on, in batches of a bounded size; `held` grows while they are written."""
    done, count = 0, _FIRST_BATCH
    while done < len(names):
        batch = {name: wanted[name] for name in names[done : done + count] if name not in held}
        done += count
        gathered = await _gather(source, batch, held, with_private=with_private)
        yield gathered
        size = sum(len(file.data) for release in gathered.releases for file in release.files)
        count = max(1, count // 4) if size > _BATCH_BYTES else min(count * 2, _LARGEST_BATCH)


async def _gather(
    source: Remote, wanted: Mapping[VersionName, Hashes], held: Mapping[VersionName, Hashes], *, with_private: bool
) -> _Gathered:
    """Read versions and whatever below them the target lacks; each is held against the hashes it was named with."""
    found: dict[VersionName, Release] = {}
    barred: dict[VersionName, str] = {}
    left = {name: digest for name, (digest, _) in wanted.items()}
    for _ in range(MAX_LINKS):
        if not left:
            break
        read, absent = await _read(source, list(left))
        barred |= dict.fromkeys(absent, "the source does not show it")
        shown = {name: digest for name, digest in left.items() if name not in barred}
        checked = await asyncio.to_thread(_checked, read, shown)
        found |= {release.name: release for release in checked}
        pins = [pin for release in checked if (pin := release.executor) and not pin.is_builtin]
        left = {pin.name: pin.digest for pin in pins if not any(pin.name in known for known in (found, held, barred))}
    barred |= dict.fromkeys(left, "the chain below it is too long")
    barred |= {name: "it is private" for name, one in found.items() if _is_hidden(one) and not with_private}
    gathered = _complete(found.values(), held, barred)
    if wrong := [str(name) for name, hashes in wanted.items() if gathered.hashes.get(name, hashes) != hashes]:
        issues = [Issue(name, "it stands on other than its closure names", "Ask the source's owner.") for name in wrong]
        raise ArtifactRefused("What the source gave", issues)
    return gathered


def _is_hidden(release: Release) -> bool:
    return release.visibility == "private"


def _complete(
    found: Iterable[Release], held: Mapping[VersionName, Hashes], barred: dict[VersionName, str]
) -> _Gathered:
    """Return the versions whose whole chain may go, executors first; the others are barred with their reason."""
    gathered = _Gathered(barred=barred)
    known = {name: digest for name, (digest, _) in held.items()} | {one.name: one.digest for one in found}
    closures = {name: closure for name, (_, closure) in held.items()}
    for release in order(tuple(found)):
        pin = release.executor
        if pin and pin.name in barred:
            barred.setdefault(release.name, f"it stands on {pin.name}, and {barred[pin.name]}")
        elif pin and not pin.is_builtin and known.get(pin.name) != pin.digest:
            barred.setdefault(release.name, f"it stands on another {pin.name} than the one there")
        if release.name not in barred:
            gathered.releases.append(release)
            closures[release.name] = closure_of(release.digest, closure_below(pin, closures))
            gathered.hashes[release.name] = (release.digest, closures[release.name])
    return gathered


async def _read(source: Remote, names: Sequence[VersionName]) -> tuple[Sequence[Release], Sequence[VersionName]]:
    """Return versions, and the names of those that the source does not show."""
    try:
        return await source.read(names), ()
    except NotFound:
        if len(names) == 1:
            return (), names
    half = len(names) // 2
    first, absent = await _read(source, names[:half])
    second, absent_too = await _read(source, names[half:])
    return (*first, *second), (*absent, *absent_too)


def _checked(releases: Sequence[Release], wanted: Mapping[VersionName, str]) -> Sequence[Release]:
    """Return releases as they may be kept, or refuse them all where one is not what it was said to be."""
    issues = [
        Issue(str(release.name), "its content is not what its digest names", "Take it from another registry.")
        for release in releases
        if wanted.get(release.name) != release.digest
    ]
    if missing := wanted.keys() - {release.name for release in releases}:
        issues += [Issue(str(name), "was asked for and not given", "Ask the source's owner.") for name in missing]
    if issues:
        raise ArtifactRefused("What the source gave", issues)
    sheets = load_sheets()
    return [check_release(release, sheets) for release in releases]
