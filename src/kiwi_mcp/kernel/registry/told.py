"""What a registry holds, as its events tell it, and which of its versions a wish means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kiwi_mcp.domain.errors import ArtifactRefused, InvalidRequest, NotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.paths import is_namespace, is_tool_id
from kiwi_mcp.domain.registry import Event, VersionName, Visibility, is_digest
from kiwi_mcp.domain.version import Range, Version

_ASPECTS = {
    "yank": "yank",
    "unyank": "yank",
    "deprecate": "deprecate",
    "undeprecate": "deprecate",
    "visibility": "visibility",
}
"""What each event is about: the last one about a thing is how the thing stands."""
_EXAMPLES = "Write `name`, `namespace/name`, `name@^1.2`, `name@1.2.3` or a digest `sha256:…`."
_MAX_LENGTH = 400

Subject = tuple[str, str, str, str]
"""What a mark is about: an aspect, and the version or, for visibility, the whole item."""


@dataclass(frozen=True, slots=True)
class Told:
    """A registry without its contents: the hashes of each version, who sees it, and the last word on it."""

    versions: Mapping[VersionName, str]
    """The digests, by name, in the order in which they were published."""
    closures: Mapping[VersionName, str]
    visibilities: Mapping[tuple[str, str], Visibility]
    marks: Mapping[Subject, Event]

    @classmethod
    def by(cls, events: Iterable[Event]) -> Told:
        """Return what a log tells; one that publishes a version twice, with two contents, is no log."""
        versions: dict[VersionName, str] = {}
        closures: dict[VersionName, str] = {}
        visibilities: dict[tuple[str, str], Visibility] = {}
        marks: dict[Subject, Event] = {}
        twice = []
        for event in events:
            visibilities[event.name.namespace, event.name.tool_id] = event.visibility
            if event.op != "publish":
                marks.pop(subject(event), None)  # the last words stay in their order, in which they were possible
                marks[subject(event)] = event
            elif (versions.setdefault(event.name, event.digest), closures.setdefault(event.name, event.closure)) != (
                event.digest,
                event.closure,
            ):
                twice.append(Issue(str(event.name), "stands twice in the log, with two contents", "Ask its owner."))
        if twice:
            raise ArtifactRefused("The log of the registry", twice)
        return cls(versions, closures, visibilities, marks)

    def is_private(self, name: VersionName) -> bool:
        """Whether only members of its namespace see a version."""
        return self.visibilities.get((name.namespace, name.tool_id)) == "private"

    def is_yanked(self, name: VersionName) -> bool:
        """Whether nobody should pick a version up any more."""
        mark = self.marks.get(("yank", name.namespace, name.tool_id, name.version))
        return mark is not None and mark.op == "yank"

    def is_news(self, mark: Event) -> bool:
        """Whether a mark from elsewhere says something else than is known here, and was not said earlier."""
        known = self.marks.get(subject(mark))
        if mark.op == "visibility" and mark.reason == self.visibilities.get((mark.name.namespace, mark.name.tool_id)):
            return False
        if known is None:
            return mark.op not in {"unyank", "undeprecate"}
        is_same = mark.op == known.op and mark.op != "visibility"
        return not is_same and _moment(mark.at) >= _moment(known.at)


def _moment(text: str) -> datetime:
    # What a folder says without a time was so from the beginning.
    return datetime.fromisoformat(text) if text else datetime.min.replace(tzinfo=UTC)


def subject(event: Event) -> Subject:
    """Return what a mark is about."""
    aspect, name = _ASPECTS[event.op], event.name
    return (aspect, name.namespace, name.tool_id, "" if aspect == "visibility" else name.version)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One version of an item: by name, by range or exact version, and by digest or closure."""

    tool_id: str = ""
    namespace: str = ""
    version: str = ""
    digest: str = ""
    """Its digest, which names its own bytes, or its closure, which names those of its executors too."""

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Return what a text asks for; what can name nothing is refused."""
        if is_digest(text):
            return cls(digest=text)
        place, at, version = text[:_MAX_LENGTH].partition("@")
        namespace, slash, tool_id = place.rpartition("/")
        is_hash = is_digest(version)
        is_range = Version.parse(version) is not None or Range.parse(version) is not None
        is_named = is_tool_id(tool_id) and (not slash or is_namespace(namespace))
        if not is_named or len(text) > _MAX_LENGTH or (at and not is_hash and not is_range):
            raise InvalidRequest(f"{text[:100]!r} names no version.", suggestion=_EXAMPLES)
        return cls(tool_id, namespace, "" if is_hash else version, version if is_hash else "")

    def exactly(self, name: VersionName) -> Wanted:
        """Return the wish for the version that was chosen, which still has to have the hash that was asked for."""
        return replace(self, tool_id=name.tool_id, namespace=name.namespace, version=name.version)

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.tool_id}" if self.namespace else self.tool_id
        return "@".join(filter(None, (place, self.version or self.digest)))

    def choose(self, told: Told, namespaces: Sequence[str]) -> VersionName:
        """Return the version that is meant: in the first of the namespaces that has one, the highest that fits.

        A yanked version, and without a range a pre-release, is chosen only where nothing else was asked for.
        """
        for namespace in (self.namespace,) if self.namespace else namespaces:
            here = [name for name in told.versions if name.namespace == namespace and self._covers(name, told)]
            standing = [name for name in here if not told.is_yanked(name)] or (here if self._is_exact else [])
            if standing:
                return max(standing, key=self._rank)
        raise self._missing(told, namespaces)

    @property
    def name(self) -> VersionName | None:
        """The one version that can be meant, where the text says that much."""
        is_whole = self.namespace and Version.parse(self.version) is not None
        return VersionName(self.namespace, self.tool_id, self.version) if is_whole else None

    @property
    def _is_exact(self) -> bool:
        return bool(self.digest) or Version.parse(self.version) is not None

    def _covers(self, name: VersionName, told: Told) -> bool:
        if self.tool_id and name.tool_id != self.tool_id:
            return False
        if self.digest and self.digest not in {told.versions[name], told.closures[name]}:
            return False
        if not self.version or self.version == name.version:
            return True
        wanted, version = Range.parse(self.version), Version.parse(name.version)
        return wanted is not None and version is not None and wanted.covers(version)

    def _rank(self, name: VersionName) -> tuple[bool, Version]:
        version = Version.parse(name.version) or Version(0, 0, 0)
        return (bool(self.version) or not version.pre, version)

    def _missing(self, told: Told, namespaces: Sequence[str]) -> NotFound:
        found = [name for name in told.versions if name.tool_id == self.tool_id]
        near = ", ".join(f"`{name}`" for name in found[-5:])
        where = "" if self.namespace else f" in {', '.join(namespaces)}"
        return NotFound(
            f"The registry has no {str(self)!r}{where}.",
            suggestion=f"{f'It has {near}. ' if near else ''}{_EXAMPLES}",
            wanted=str(self),
        )
