"""The index of a layout: every version in it, and what may be known of each without opening its artifact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from kiwi_mcp.domain.errors import ArtifactRefused, NotFound, TooLarge, VersionConflict
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.registry import Event, Mark, Op, Pin, Release, VersionName, is_digest, is_same_executor
from kiwi_mcp.store.artifact import ARTIFACT_TYPE, MANIFEST_TYPE, MAX_MANIFEST, Artifact, Descriptor
from kiwi_mcp.store.json_bytes import NotJson, canonical, most_values, read_json
from kiwi_mcp.store.order import MAX_ISSUES, closures, order
from kiwi_mcp.store.words import (
    DIGEST,
    REF_NAME,
    Facts,
    Marks,
    add_mark,
    bad_marks,
    marks_of,
    read_marks,
    visibility_in,
    write_marks,
)

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MAX_INDEX = 128_000_000
_MAX_VALUES = 4_000_000
_AGAIN = "Write the folder again from the registry it came from."


@dataclass(frozen=True, slots=True)
class Entry:
    """One version in an index: where its artifact is, its digest, and what was said of it."""

    facts: Facts
    digest: str
    artifact: str
    """The digest of the artifact's manifest."""
    size: int
    marks: Marks = field(default_factory=dict)

    @classmethod
    def of(cls, release: Release, artifact: Artifact) -> Entry:
        """Return the entry of a release."""
        facts = Facts.of(release)
        return cls(facts, release.digest, artifact.digest, len(artifact.manifest), marks_of(release))

    @classmethod
    def read(cls, value: Json, place: str, issues: list[Issue]) -> Entry:
        """Return the entry that a descriptor holds, and note what is wrong with it."""
        found = Descriptor.read(value)
        entry = cls(
            Facts.read(found.words), found.words.get(DIGEST, ""), found.digest, found.size, read_marks(found.words)
        )
        wrong = [*found.issues(place, MANIFEST_TYPE, MAX_MANIFEST), *entry.facts.issues(), *bad_marks(entry.marks)]
        issues += (replace(issue, place=f"{place} {issue.place}") for issue in wrong)
        if not is_digest(entry.digest):
            issues.append(Issue(place, f"it has no {DIGEST}", _AGAIN))
        return entry

    @property
    def name(self) -> VersionName:
        """The name of the version."""
        return self.facts.name

    @property
    def executor(self) -> Pin | None:
        """What the version stands on."""
        return self.facts.executor

    def is_like(self, other: Entry) -> bool:
        """Whether both have the same content, on the same executor."""
        return self.digest == other.digest and is_same_executor(self.executor, other.executor)

    def to_json(self) -> JsonObject:
        """Return the entry as a descriptor."""
        name = self.name
        words = {
            **self.facts.to_words(),
            **write_marks(self.marks),
            DIGEST: self.digest,
            REF_NAME: f"{name.namespace}/{name.tool_id}/{name.version}",
        }
        return {
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "digest": self.artifact,
            "size": self.size,
            "annotations": words,
        }


@dataclass(frozen=True, slots=True)
class Index:
    """All entries, executors first, and the closure of each."""

    what: str
    """What a refusal calls it."""
    entries: Mapping[VersionName, Entry] = field(default_factory=dict)
    closures: Mapping[VersionName, str] = field(default_factory=dict)

    @classmethod
    def read(cls, data: bytes, what: str) -> Index:
        """Return the index in some bytes, with every fault in it found or none."""
        issues: list[Issue] = []
        rows = enumerate(_rows(data, issues))
        entries = [Entry.read(row, f"manifests[{number}]", issues) for number, row in rows]
        if len({entry.name for entry in entries}) != len(entries):
            issues.append(Issue("manifests", "a version stands in it twice", _AGAIN))
        if issues:
            raise ArtifactRefused(what, islice(issues, MAX_ISSUES))
        return _ordered(what, entries)

    def grown(self, entries: Sequence[Entry], marks: Sequence[Event]) -> Index:
        """Return the index with more entries and marks; a version that is there with another closure refuses all."""
        by_name = dict(self.entries)
        conflicts = [str(entry.name) for entry in entries if not entry.is_like(by_name.setdefault(entry.name, entry))]
        if conflicts:
            raise VersionConflict(conflicts)
        _mark(by_name, marks, self.what)
        return self if by_name == self.entries else _ordered(self.what, by_name.values())

    def events(self) -> Iterator[Event]:
        """Yield what happened to give this index: every version published, executors first, then the marks."""
        for entry in self.entries.values():
            yield self._event(entry, "publish", Mark(entry.facts.created_at), actor=entry.facts.published_by)
        shown = set[tuple[str, str]]()
        for entry in self.entries.values():
            for op, mark in entry.marks.items():
                if op != "visibility":
                    yield self._event(entry, op, mark)
                elif mark.at and _item(entry.name) not in shown:  # without a time, it was published so
                    shown.add(_item(entry.name))
                    yield self._event(entry, op, mark)

    def to_bytes(self) -> bytes:
        """Return the index as it is written: the same bytes for the same entries."""
        rows: list[Json] = [entry.to_json() for _, entry in sorted(self.entries.items(), key=lambda row: str(row[0]))]
        data = canonical({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows})
        if len(data) > MAX_INDEX or most_values(data) > _MAX_VALUES:
            raise TooLarge(f"The index of {self.what}", size=len(data), limit=MAX_INDEX)
        return data

    def _event(self, entry: Entry, op: Op, mark: Mark, *, actor: str = "") -> Event:
        closure, visibility = self.closures[entry.name], visibility_in(entry.marks)
        return Event(0, op, entry.name, entry.digest, closure, actor, mark.at, mark.reason, visibility)


def _ordered(what: str, entries: Iterable[Entry]) -> Index:
    ordered = order(entries, what=what)
    return Index(what, {entry.name: entry for entry in ordered}, closures(ordered, what=what))


def _rows(data: bytes, issues: list[Issue]) -> Sequence[Json]:
    try:
        document = as_object(read_json(data, max_bytes=MAX_INDEX, max_values=_MAX_VALUES))
    except NotJson as fault:
        issues.append(Issue("", str(fault), _AGAIN))
        return ()
    # Some programs that copy layouts leave out the type, which may be left out.
    if document.get("schemaVersion") != 2 or document.get("mediaType", INDEX_TYPE) != INDEX_TYPE:  # noqa: PLR2004 - the specification's number
        issues.append(Issue("", f"it is not of the type {INDEX_TYPE}", _AGAIN))
    return as_list(document.get("manifests"))


def _mark(by_name: dict[VersionName, Entry], marks: Sequence[Event], what: str) -> None:
    """Say of entries what was said of their versions; what is said of a visibility holds for the whole item."""
    versions: dict[tuple[str, str], list[VersionName]] = {}
    for name in by_name if marks else ():
        versions.setdefault(_item(name), []).append(name)
    issues: list[Issue] = []
    for event in marks:
        meant = versions.get(_item(event.name), []) if event.op == "visibility" else [event.name]
        if event.op == "publish" or not meant or any(name not in by_name for name in meant):
            raise NotFound(
                f"{event.name} is not there, so nothing can be said of it ({event.op}).",
                suggestion="Write the version first.",
            )
        for name in meant:
            by_name[name] = entry = replace(by_name[name], marks=add_mark(by_name[name].marks, event))
            issues += (replace(issue, place=f"{name} {issue.place}") for issue in bad_marks(entry.marks))
    if issues:
        raise ArtifactRefused(what, islice(issues, MAX_ISSUES))


def _item(name: VersionName) -> tuple[str, str]:
    return name.namespace, name.tool_id
