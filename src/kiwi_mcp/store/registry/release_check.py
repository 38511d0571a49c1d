"""The one check of a release before it is stored, and the order and closures of releases by their executors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import datetime
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import TypeVar, get_args

from msgspec.structs import asdict, force_setattr

from kiwi_mcp.domain.errors import ArtifactRefused, draw
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import NO_SOURCE, SOURCE_TRAITS
from kiwi_mcp.domain.json import JsonObject, NotJson, as_list, as_object, as_text, canonical, read_json
from kiwi_mcp.domain.names import Range, Version, clashes, is_namespace, is_safe_path, is_tool_id
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    Linked,
    Pin,
    Release,
    StatusNote,
    VersionName,
    Visibility,
    closure_in,
    is_digest,
    pins_of,
)

MAX_LINKS = 16
MAX_REFERENCES = 200
MAX_ISSUES = 100  # the maximum number of faults that a refusal lists


AnyLinked = TypeVar("AnyLinked", bound=Linked)


def order(versions: Iterable[AnyLinked], *, what: str = "The set of versions") -> tuple[AnyLinked, ...]:
    """Return versions, each after what it depends on; refuse a cycle, a long chain, or a pin to other content here."""
    by_name = {version.name: version for version in versions}
    digests = {name: version.digest for name, version in by_name.items()}
    depths: dict[VersionName, int] = {}
    issues: list[Issue] = []
    for name, version in by_name.items():
        for pin in pins_of(version):
            if digests.get(pin.name, pin.digest) != pin.digest:
                reason = f"it is pinned to {pin.name} with the digest {pin.digest}, and the one here has another"
                issues.append(Issue(str(name), reason, "Take both from one registry."))
        # The version and its executors, of which each is walked once.
        path: dict[VersionName, None] = {}
        step: VersionName | None = name
        while step is not None and step in by_name and step not in depths and step not in path:
            path[step] = None
            executor = by_name[step].executor
            step = executor.name if executor else None
        is_cycle = step in path
        depth = depths.get(step, 0) if step else 0
        for link in reversed(path):
            depth += 1
            depths[link] = depth
        if is_cycle:
            chain = draw([str(link) for link in path][:MAX_LINKS])
            issues.append(Issue(str(name), f"its executors form a cycle: {chain} → {step}", "Break the cycle."))
        elif path and depth > MAX_LINKS:
            reason = f"its chain has {depth:,} links; the limit is {MAX_LINKS}"
            issues.append(Issue(str(name), reason, "Remove links."))
    ranks = depths if issues or not any(one.references for one in by_name.values()) else _ranks(by_name, issues)
    if issues:
        raise ArtifactRefused(what, islice(issues, MAX_ISSUES))
    return tuple(sorted(by_name.values(), key=lambda version: (ranks[version.name], str(version.name))))


def _ranks(by_name: Mapping[VersionName, Linked], issues: list[Issue]) -> Mapping[VersionName, int]:
    """Return a number for each version that is higher than those of all that it depends on."""
    below = {name: [pin.name for pin in pins_of(one) if pin.name in by_name] for name, one in by_name.items()}
    ranks: dict[VersionName, int] = {}
    try:
        for name in TopologicalSorter(below).static_order():
            ranks[name] = 1 + max((ranks[one] for one in below[name]), default=0)
    except CycleError as error:
        circle = [str(name) for name in reversed(error.args[1])]
        issues.append(Issue(circle[0], f"what they name forms a cycle: {draw(circle)}", "Break the cycle."))
    return ranks


def closures(ordered: Sequence[Linked], *, what: str) -> Mapping[VersionName, str]:
    """Return the closure of each version of an ordered set that lacks nothing but items that ship with Kiwi."""
    found: dict[VersionName, str] = {}
    issues: list[Issue] = []
    for version in ordered:
        for below in pins_of(version):
            if not below.is_builtin and below.name not in found:
                fix = f"Add {below.name} first."
                issues.append(Issue(str(version.name), f"it depends on {below.name}, which is not there", fix))
        found[version.name] = closure_in(version, found)
    if issues:
        raise ArtifactRefused(what, islice(issues, MAX_ISSUES))
    return found


MAX_FILES = 2_000
MAX_BYTES = 64_000_000
MAX_STATEMENT = 4_000_000
MAX_TEXT = 64_000  # the longest changelog or reason, in characters
MAX_SIDECAR = 4_096  # the most that the file may hold that tells who signed a version, in bytes
MAX_WORD = 400  # the longest name of a person or reference, and how much of a wrong one is quoted

_KIND = "kiwi.item/1"
_KINDS = ("tools", "directives", "knowledge", "skills", "scripts")
_MAX_VALUES = 1_000_000
_MAX_VERSION = 64
_HASHED = lazy_pattern(rb'"manifest":"([0-9a-f]{64})"')
_TIME = lazy_pattern(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|\+00:00)", re.ASCII)
_BROKEN_TEXT = lazy_pattern(r"[\x00\ud800-\udfff]")
_VISIBILITIES: tuple[Visibility, ...] = get_args(Visibility)
_AGAIN = "Publish it again from its source."


class CheckedRelease(Release, frozen=True):
    """A release that passed the check: one that does not cannot be made, nor by a change of another."""

    def __post_init__(self) -> None:
        """Refuse a release with everything that is wrong with it."""
        if issues := tuple(islice(release_issues(self), MAX_ISSUES)):
            raise ArtifactRefused(str(self.name)[:MAX_WORD], issues)

    @classmethod
    def of(cls, release: Release) -> CheckedRelease:
        """Return a release checked; one that was checked before is not checked again."""
        if isinstance(release, cls):
            return release
        return cls(**asdict(release))

    def with_manifest(self, manifest: JsonObject) -> CheckedRelease:
        """Return the release with its manifest read, which is no part of the check."""
        made = copy(self)
        force_setattr(made, "manifest", manifest)
        return made


def require_checked(releases: Sequence[Release]) -> None:
    """Raise where a caller hands over a release that was not checked: nothing of it is stored."""
    if unchecked := [str(one.name)[:MAX_WORD] for one in releases if not isinstance(one, CheckedRelease)]:
        raise TypeError(f"{', '.join(unchecked[:10])}: this release was not checked")


def release_issues(release: Release) -> Iterator[Issue]:
    """Yield every reason not to keep a release; the manifest's own text is read elsewhere."""
    files = [(file.path, len(file.data)) for file in release.files]
    issues = [*_names(release), *unsafe_files(files)]
    yield from issues
    yield from _statement(release, is_clean=not issues)


def unsafe_files(files: Sequence[tuple[str, int]]) -> Iterator[Issue]:
    """Yield the faults of paths and sizes: unsafe, clashing, too many, too large. The file contents are not needed."""
    size = sum(size for _, size in files)
    if len(files) > MAX_FILES:
        yield Issue("files", f"{len(files):,} files; the limit is {MAX_FILES:,}", "Publish fewer files.")
        return
    if size > MAX_BYTES:
        yield Issue("files", f"{size:,} bytes; the limit is {MAX_BYTES:,}", "Publish less, and fetch what is large.")
    paths = [path for path, _ in files]
    for path in paths:
        if not is_safe_path(path):
            yield Issue("files", f"{path[:MAX_WORD]!r} is not a path that is safe on every system", "Rename the file.")
    # Unsafe ones are left out here: they may be of any length, and each of their folders would be looked at.
    for path, other in clashes([path for path in paths if is_safe_path(path)]):
        yield Issue("files", f"{path!r} and {other!r} cannot both be there on every system", "Rename one of them.")


def bad_name(name: VersionName, place: str) -> Iterator[Issue]:
    """Yield the faults in the parts of a version's name."""
    if not is_namespace(name.namespace):
        yield Issue(f"{place}namespace", f"{name.namespace[:MAX_WORD]!r} cannot be a namespace", _AGAIN)
    if not is_tool_id(name.tool_id):
        yield Issue(f"{place}tool_id", f"{name.tool_id[:MAX_WORD]!r} cannot name an item", _AGAIN)
    # A version is taken only as it is written back, so that each has one spelling; build metadata has none.
    parsed = Version.parse(name.version) if len(name.version) <= _MAX_VERSION else None
    if parsed is None or str(parsed) != name.version:
        fix = "Use a semantic version without build metadata, such as 1.2.0."
        yield Issue(f"{place}version", f"{name.version[:MAX_WORD]!r} is not a version that can be published", fix)


def bad_pins(namespace: str, executor: Pin | None, references: Sequence[Pin]) -> Iterator[Issue]:
    """Yield the faults of what a version in a namespace depends on."""
    if executor is not None:
        yield from bad_pin(executor, namespace)
    refs = [pin.ref for pin in references[: MAX_REFERENCES + 1]]
    if len(refs) > MAX_REFERENCES or refs != sorted({*refs}) or any(not ref.isprintable() for ref in refs):
        reason = f"they are not up to {MAX_REFERENCES} names in alphabetical order, each once"
        yield Issue("references", reason, _AGAIN)
        return
    for pin in references:
        yield from bad_pin(pin, namespace, place="references")


def bad_pin(pin: Pin, namespace: str, *, place: str = "executor") -> Iterator[Issue]:
    """Yield the faults of a pin: the item's digest covers its reference alone, so the pin must match that."""
    yield from bad_name(pin.name, f"{place}.")
    if not is_digest(pin.digest):
        yield Issue(f"{place}.digest", f"{pin.digest[:MAX_WORD]!r} is not a digest", _AGAIN)
    yield from bad_text(pin.ref, place, limit=MAX_WORD)
    named_place, _, wanted = pin.ref[: MAX_WORD + 1].partition("@")
    home, _, tool_id = named_place.rpartition("/")
    if tool_id != pin.name.tool_id or not _covers(wanted, pin):
        reason = f"it asks for {pin.ref[:MAX_WORD]!r} and is pinned to {str(pin.name)[:MAX_WORD]}"
        yield Issue(place, reason, _AGAIN)
        return
    source, _, named = home.partition("/")
    traits = SOURCE_TRAITS.get(source, NO_SOURCE)
    homes = (named,) if traits.is_published or traits.is_built_in else (namespace, BUILTIN_NAMESPACE)
    if place == "references" and home == source and source not in SOURCE_TRAITS:  # `namespace/name`, or a category
        homes = (source, *homes)
    if pin.name.namespace not in homes:
        reason = f"it asks for {pin.ref[:MAX_WORD]!r}, which does not mean {str(pin.name)[:MAX_WORD]}"
        key = "executor: " if place == "executor" else ""
        fix = f"Write `{key}registry/{pin.name.namespace[:MAX_WORD]}/{tool_id}` in its manifest, if that is meant."
        yield Issue(place, reason, fix)


def _covers(wanted: str, pin: Pin) -> bool:
    """Whether a pin is to a version that a reference asks for."""
    if wanted in {"", pin.name.version, pin.digest}:
        return True
    covered, version = Range.parse(wanted), Version.parse(pin.name.version)
    return covered is not None and version is not None and covered.covers(version)


def bad_status_note(note: StatusNote, place: str) -> Iterator[Issue]:
    """Yield the faults of a status note."""
    if not note.at:
        yield Issue(f"{place}.at", "it does not say when", _AGAIN)
    yield from bad_time(note.at, f"{place}.at")
    yield from bad_text(note.reason, f"{place}.reason")


def bad_time(text: str, place: str) -> Iterator[Issue]:
    """Yield an issue where a text is neither empty nor a time in UTC."""
    try:
        is_time = _TIME.fullmatch(text) is not None and datetime.fromisoformat(text) is not None
    except ValueError:
        is_time = False
    if text and not is_time:
        yield Issue(place, f"{text[:MAX_WORD]!r} is not a time in UTC", "Write it as 2026-01-28T12:00:00.000Z.")


def bad_text(text: str, place: str, *, limit: int = MAX_TEXT) -> Iterator[Issue]:
    """Yield an issue where a text is longer than it may be, or holds what no store keeps."""
    if len(text) > limit:
        yield Issue(place, f"{len(text):,} characters; the limit is {limit:,}", "Write less.")
    if _BROKEN_TEXT.search(text):
        yield Issue(place, "it holds a NUL or half a character", "Write it as plain text.")


def bad_visibility(text: str) -> Iterator[Issue]:
    """Yield an issue where a text is no visibility."""
    if text not in _VISIBILITIES:
        fix = f"Use one of: {', '.join(_VISIBILITIES)}."
        yield Issue("visibility", f"{text[:MAX_WORD]!r} is no visibility", fix)


def _names(release: Release) -> Iterator[Issue]:
    yield from bad_name(release.name, "")
    yield from bad_pins(release.name.namespace, release.executor, release.references)
    if not is_safe_path(release.place) or release.place.partition("/")[0] not in _KINDS or "/" not in release.place:
        fix = f"An item is below one of: {', '.join(_KINDS)}."
        yield Issue("place", f"{release.place[:MAX_WORD]!r} is not a valid place for an item", fix)
    if release.manifest_path not in {file.path for file in release.files}:
        yield Issue("place", f"the file with the manifest, {release.manifest_path[:MAX_WORD]!r}, is missing", _AGAIN)
    beside = next((file for file in release.files if file.path == release.sidecar_path), None)
    if beside and (len(beside.data) > MAX_SIDECAR or beside.is_executable):
        yield Issue("files", f"{beside.path[:MAX_WORD]!r} is more than a signature", _AGAIN)
    if release.is_builtin and release.name.namespace != BUILTIN_NAMESPACE:
        yield Issue("is_builtin", f"nothing in {release.name.namespace[:MAX_WORD]!r} ships with Kiwi", _AGAIN)
    yield from bad_text(release.changelog, "changelog")
    yield from bad_text(release.published_by, "published_by", limit=MAX_WORD)
    yield from bad_time(release.created_at, "created_at")
    yield from bad_visibility(release.visibility)
    for place, note in (("yanked", release.yanked), ("deprecated", release.deprecated)):
        if note is not None:
            yield from bad_status_note(note, place)


def _statement(release: Release, *, is_clean: bool) -> Iterator[Issue]:
    # A statement that equals the expected canonical JSON need not be parsed: only the manifest hash is taken from it.
    expected_fields: JsonObject = {
        "kind": _KIND,
        "tool_id": release.name.tool_id,
        "version": release.name.version,
        "executor": release.executor.ref if release.executor else None,
    }
    files: Sequence[JsonObject] = [
        {"path": file.path, "sha256": file.sha256, "executable": file.is_executable}
        for file in sorted(release.files, key=lambda file: file.path)
        if file.path not in {release.manifest_path, release.sidecar_path}
    ]
    hashed = _HASHED.search(release.statement)
    if is_clean and hashed is not None:
        expected: JsonObject = {**expected_fields, "manifest": hashed[1].decode(), "files": files}
        if canonical(expected) == release.statement:
            return
    try:
        statement = as_object(read_json(release.statement, max_bytes=MAX_STATEMENT, max_values=_MAX_VALUES))
    except NotJson as fault:
        yield Issue("statement", str(fault), _AGAIN)
        return
    issues: list[Issue] = []
    for name, value in expected_fields.items():
        if (stated := statement.get(name)) != value:
            reason = f"its statement says {str(stated)[:MAX_WORD]!r}, the release {str(value)[:MAX_WORD]!r}"
            issues.append(Issue(name, reason, _AGAIN))
    if not is_digest(f"sha256:{as_text(statement.get('manifest'))}"):
        issues.append(Issue("manifest", "its statement holds no hash of the manifest", _AGAIN))
    listed = {as_text(as_object(row).get("path")): as_object(row) for row in as_list(statement.get("files"))}
    found = {as_text(row.get("path")): row for row in files}
    different = {path for path in found.keys() & listed.keys() if found[path] != listed[path]}
    for paths, reason in (
        (listed.keys() - found.keys(), "is stated and missing"),
        (found.keys() - listed.keys(), "is there and not stated"),
        (different, "is not the file that was stated"),
    ):
        issues += (Issue("files", f"{path[:MAX_WORD]!r} {reason}", _AGAIN) for path in sorted(paths))
    yield from issues
    if is_clean and not issues:
        yield Issue("statement", "it is not canonical JSON", _AGAIN)
