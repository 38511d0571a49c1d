"""Drafts: releases that were checked by themselves, before any store is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

from kiwi_mcp.domain.errors import ArtifactRefused, NamespaceDenied, VersionConflict
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Actor, Pin, Release, VersionName, is_same_executor
from kiwi_mcp.domain.version import Version
from kiwi_mcp.store.contents import column_json, is_stated, manifest_text
from kiwi_mcp.store.order import MAX_ISSUES, order
from kiwi_mcp.store.soundness import unsound

_TYPE = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_AGAIN = "Publish it again from its source."


class Draft(NamedTuple):
    """A sound release, and what follows from it alone."""

    release: Release
    name: VersionName
    executor: Pin | None
    digest: str
    key: str
    """The version as it is ordered."""
    is_prerelease: bool
    tool_type: str
    manifest: str
    """The manifest as JSON."""
    text: str | None
    """The manifest's own file, where it is a file of its own."""

    def is_like(self, other: Draft) -> bool:
        """Whether both have the same content, on the same executor."""
        return self.digest == other.digest and is_same_executor(self.executor, other.executor)

    @property
    def text_hash(self) -> str | None:
        """The hash of the manifest's own file."""
        return sha256(self.text.encode()).hexdigest() if self.text is not None else None


def drafts_of(releases: Sequence[Release], actor: Actor, *, is_seeding: bool) -> tuple[Draft, ...]:
    """Return releases as drafts, executors first, or refuse them all with everything that is wrong with any."""
    for namespace in {release.name.namespace: None for release in releases}:
        if not (is_seeding if namespace == BUILTIN_NAMESPACE else actor.is_member(namespace)):
            raise NamespaceDenied(namespace, namespaces=actor.namespaces)
    issues: list[Issue] = []
    drafts: dict[VersionName, Draft] = {}
    conflicts: list[str] = []
    for release in releases:
        found = _draft(release)
        if not isinstance(found, Draft):
            issues += found
        elif not found.is_like(drafts.setdefault(found.name, found)):
            conflicts.append(str(found.name))
    if issues:
        what = str(releases[0].name) if len(releases) == 1 else "The set of versions"
        raise ArtifactRefused(what[:400], islice(issues, MAX_ISSUES))
    if conflicts:
        raise VersionConflict(conflicts)
    return order(drafts.values())


def _draft(release: Release) -> Draft | list[Issue]:
    issues = [*unsound(release)]
    manifest, text = "", None
    try:
        manifest, text = column_json(release.manifest), manifest_text(release)
        manifest.encode()
    except (ValueError, TypeError, RecursionError, StopIteration):
        issues.append(Issue("manifest", "it cannot be read", _AGAIN))
    issues += _manifest_faults(release, manifest, text)
    version = Version.parse(release.name.version)
    if issues or version is None:
        return [Issue(f"{release.name}: {one.place}"[:400], one.reason, one.fix) for one in issues]
    tool_type = as_text(release.manifest.get("tool_type"))
    order_of = (version.key, bool(version.pre))
    return Draft(release, release.name, release.executor, release.digest, *order_of, tool_type, manifest, text)


def _manifest_faults(release: Release, manifest: str, text: str | None) -> Iterator[Issue]:
    # PostgreSQL keeps a NUL in no text, be it escaped.
    if ("\\u0000" in manifest and _NUL.search(manifest)) or (text is not None and "\0" in text):
        yield Issue("manifest", "it holds a NUL", "Write it as plain text.")
    if _TYPE.fullmatch(as_text(release.manifest.get("tool_type"))) is None:
        yield Issue("manifest.tool_type", "it names no type", _AGAIN)
    if release.is_official and release.name.namespace != BUILTIN_NAMESPACE:
        yield Issue("is_official", f"nothing in {release.name.namespace[:64]!r} is official", _AGAIN)
    if not is_stated(release):
        yield Issue("statement", "its file with the manifest is not the one that was stated", _AGAIN)
