"""Words: what the annotations of OCI documents say of a version, on artifacts and on an index alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, cast, get_args

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, as_object, as_text
from kiwi_mcp.domain.registry import Event, Mark, Op, Pin, Release, VersionName, Visibility
from kiwi_mcp.store.soundness import MAX_WORD, bad_mark, bad_name, bad_pin, bad_text, bad_time, bad_visibility

Marks: TypeAlias = Mapping[Op, Mark]
"""What was last said of a version after it was sealed, by what was done; a visibility is the reason of its mark.

The mark of a visibility has no time where the version was published with it.
"""

CHANGELOG = "vnd.kiwi.changelog"
DIGEST = "vnd.kiwi.digest"
EXECUTABLE = "vnd.kiwi.executable"
IS_BUILTIN = "vnd.kiwi.is_builtin"
IS_OFFICIAL = "vnd.kiwi.is_official"
PLACE = "vnd.kiwi.place"
REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"

_NAMESPACE = "vnd.kiwi.namespace"
_TOOL_ID = "vnd.kiwi.tool_id"
_VERSION = "org.opencontainers.image.version"
_CREATED = "org.opencontainers.image.created"
_PUBLISHED_BY = "vnd.kiwi.published_by"
_EXECUTOR = "vnd.kiwi.executor"
_MARKS: tuple[Op, ...] = tuple(op for op in get_args(Op) if op != "publish")
_OPPOSITE: Mapping[Op, Op] = {
    "yank": "unyank",
    "unyank": "yank",
    "deprecate": "undeprecate",
    "undeprecate": "deprecate",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What an artifact and the index both say of a version, and must say alike."""

    name: VersionName
    executor: Pin | None
    published_by: str
    created_at: str

    @classmethod
    def of(cls, release: Release) -> Facts:
        """Return the facts of a release."""
        return cls(release.name, release.executor, release.published_by, release.created_at)

    @classmethod
    def read(cls, words: Mapping[str, str]) -> Facts:
        """Return the facts among some annotations; what is missing is empty, which the check finds."""
        name = VersionName(words.get(_NAMESPACE, ""), words.get(_TOOL_ID, ""), words.get(_VERSION, ""))
        return cls(name, _read_pin(words), words.get(_PUBLISHED_BY, ""), words.get(_CREATED, ""))

    def to_words(self) -> Mapping[str, str]:
        """Return the facts as annotations; what is empty has none."""
        words = {
            _NAMESPACE: self.name.namespace,
            _TOOL_ID: self.name.tool_id,
            _VERSION: self.name.version,
            _PUBLISHED_BY: self.published_by,
            _CREATED: self.created_at,
        }
        if (pin := self.executor) is not None:
            words[_EXECUTOR] = pin.ref
            words[f"{_EXECUTOR}.namespace"] = pin.name.namespace
            words[f"{_EXECUTOR}.tool_id"] = pin.name.tool_id
            words[f"{_EXECUTOR}.version"] = pin.name.version
            words[f"{_EXECUTOR}.digest"] = pin.digest
        return {key: text for key, text in words.items() if text}

    def issues(self) -> Iterator[Issue]:
        """Yield what is wrong with the facts."""
        yield from bad_name(self.name, "")
        if self.executor is not None:
            yield from bad_pin(self.executor, self.name.namespace)
        yield from bad_text(self.published_by, "published_by", limit=MAX_WORD)
        yield from bad_time(self.created_at, "created_at")


def _read_pin(words: Mapping[str, str]) -> Pin | None:
    if not any(key.startswith(_EXECUTOR) for key in words):
        return None
    parts = [words.get(f"{_EXECUTOR}.{part}", "") for part in ("namespace", "tool_id", "version", "digest")]
    return Pin(words.get(_EXECUTOR, ""), VersionName(*parts[:3]), parts[3])


def read_words(annotations: Json) -> Mapping[str, str]:
    """Return the annotations that are texts, as all of them have to be."""
    return {key: text for key, text in as_object(annotations).items() if isinstance(text, str)}


def marks_of(release: Release) -> Marks:
    """Return what was said of a release after it was sealed."""
    marks: dict[Op, Mark] = {}
    if release.yanked is not None:
        marks["yank"] = release.yanked
    if release.deprecated is not None:
        marks["deprecate"] = release.deprecated
    if release.visibility != "public":
        marks["visibility"] = Mark("", release.visibility)
    return marks


def with_marks(release: Release, marks: Marks) -> Release:
    """Return a release as it is after all that was said of it."""
    return replace(
        release, yanked=marks.get("yank"), deprecated=marks.get("deprecate"), visibility=visibility_in(marks)
    )


def visibility_in(marks: Marks) -> Visibility:
    """Return the visibility that was last given, which is checked where marks are read."""
    return cast("Visibility", marks["visibility"].reason) if "visibility" in marks else "public"


def add_mark(marks: Marks, event: Event) -> Marks:
    """Return marks after one more event: the last word of each kind holds."""
    kept = {op: mark for op, mark in marks.items() if op != _OPPOSITE.get(event.op)}
    return {**kept, event.op: Mark(event.at, event.reason)}


def write_marks(marks: Marks) -> Mapping[str, str]:
    """Return marks as annotations."""
    words = {f"vnd.kiwi.{op}.at": mark.at for op, mark in marks.items()}
    return words | {f"vnd.kiwi.{op}.reason": mark.reason for op, mark in marks.items() if mark.reason}


def read_marks(words: Mapping[str, str]) -> Marks:
    """Return the marks among some annotations."""
    return {
        op: Mark(words[f"vnd.kiwi.{op}.at"], words.get(f"vnd.kiwi.{op}.reason", ""))
        for op in _MARKS
        if f"vnd.kiwi.{op}.at" in words
    }


def marks_to_json(marks: Marks) -> Json:
    """Return marks as a JSON object."""
    return {op: {"at": mark.at, "reason": mark.reason} for op, mark in marks.items()}


def marks_from_json(value: Json) -> Marks:
    """Return the marks in a JSON object."""
    rows = {op: as_object(as_object(value).get(op)) for op in _MARKS if op in as_object(value)}
    return {op: Mark(as_text(row.get("at")), as_text(row.get("reason"))) for op, row in rows.items()}


def bad_marks(marks: Marks) -> Iterator[Issue]:
    """Yield what is wrong with marks."""
    for op, mark in marks.items():
        if op != "visibility" or mark.at:
            yield from bad_mark(mark, op)
        if _OPPOSITE.get(op) in marks:
            yield Issue(op, f"it is said together with {_OPPOSITE[op]}", "Take it from its registry again.")
    yield from bad_visibility(visibility_in(marks))
