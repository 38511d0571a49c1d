"""The order in which versions can be kept: each behind the one it stands on, whose hash is part of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from kiwi_mcp.domain.errors import ArtifactRefused, draw
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.registry import Pin, VersionName, closure_below, closure_of

MAX_LINKS = 16
MAX_ISSUES = 100
"""How many faults a refusal lists: enough to see what is wrong, however much is."""


class Linked(Protocol):
    """A version and what it stands on."""

    @property
    def name(self) -> VersionName:
        """Its name."""

    @property
    def digest(self) -> str:
        """Its digest."""

    @property
    def executor(self) -> Pin | None:
        """The version it stands on, if any."""


AnyLinked = TypeVar("AnyLinked", bound=Linked)


def order(versions: Iterable[AnyLinked], *, what: str = "The set of versions") -> tuple[AnyLinked, ...]:
    """Return versions with executors first, or refuse them all: a cycle, a long chain, a pin to other content.

    A pin to a version that is not among them is left to whoever knows more.
    """
    by_name = {version.name: version for version in versions}
    digests = {name: version.digest for name, version in by_name.items()}
    depths: dict[VersionName, int] = {}
    issues: list[Issue] = []
    for name, version in by_name.items():
        issues += _other_content(version, digests)
        issues += _measure(name, by_name, depths)
    if issues:
        raise ArtifactRefused(what, islice(issues, MAX_ISSUES))
    return tuple(sorted(by_name.values(), key=lambda version: (depths[version.name], str(version.name))))


def closures(ordered: Sequence[Linked], *, what: str) -> Mapping[VersionName, str]:
    """Return the closure of each version of a set that stands in order and lacks nothing but what ships with Kiwi."""
    found: dict[VersionName, str] = {}
    issues: list[Issue] = []
    for version in ordered:
        below = version.executor
        if below is not None and not below.is_builtin and below.name not in found:
            fix = f"Add {below.name} first."
            issues.append(Issue(str(version.name), f"it stands on {below.name}, which is not there", fix))
        found[version.name] = closure_of(version.digest, closure_below(below, found))
    if issues:
        raise ArtifactRefused(what, islice(issues, MAX_ISSUES))
    return found


def _other_content(version: Linked, digests: Mapping[VersionName, str]) -> Iterable[Issue]:
    pin = version.executor
    if pin is not None and digests.get(pin.name, pin.digest) != pin.digest:
        reason = f"it is pinned to {pin.name} with the digest {pin.digest}, and the one here has another"
        yield Issue(str(version.name), reason, "Take both from one registry.")


def _measure(name: VersionName, by_name: Mapping[VersionName, Linked], depths: dict[VersionName, int]) -> list[Issue]:
    """Note the depth of a version and of all below it, each of which is walked once."""
    path: dict[VersionName, None] = {}
    step: VersionName | None = name
    while step is not None and step in by_name and step not in depths and step not in path:
        path[step] = None
        pin = by_name[step].executor
        step = pin.name if pin else None
    is_cycle = step in path
    depth = depths.get(step, 0) if step else 0
    for link in reversed(path):
        depth += 1
        depths[link] = depth
    if is_cycle:
        chain = [str(link) for link in path][:MAX_LINKS]
        return [Issue(str(name), f"its executors form a cycle: {draw(chain)} → {step}", "Break the cycle.")]
    if path and depth > MAX_LINKS:
        return [Issue(str(name), f"its chain has {depth:,} links; the limit is {MAX_LINKS}", "Remove links.")]
    return []
