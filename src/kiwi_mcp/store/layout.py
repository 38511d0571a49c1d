"""Layouts: a folder in OCI image layout as a registry, to read versions from and to write them to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kiwi_mcp.domain.errors import ArtifactRefused, Conflict, NotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import as_object
from kiwi_mcp.domain.registry import Event, Published, Release, VersionName
from kiwi_mcp.store.artifact import Artifact, decode, digest_of, encode
from kiwi_mcp.store.folder import NEW, below, lock, make_below, opened, put_file, read_file, unusable
from kiwi_mcp.store.index import MAX_INDEX, Entry, Index
from kiwi_mcp.store.json_bytes import NotJson, canonical, read_json
from kiwi_mcp.store.order import MAX_ISSUES
from kiwi_mcp.store.soundness import unsound
from kiwi_mcp.store.words import Facts

_MARK = "oci-layout"
_INDEX = "index.json"
_BLOBS = ("blobs", "sha256")
_VERSION = "1.0.0"
_MAX_MARK = 4_096
_AGAIN = "Write the folder again from the registry it came from."

Stamp = tuple[int, int, int, int]


class Layout:
    """A folder in OCI image layout. One that is not there yet, or is empty, holds nothing and can be written to.

    The index is replaced last, so that a version is in the folder whole or not at all. Files of which the index says
    nothing are left alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: tuple[Stamp, Index] | None = None

    @property
    def is_there(self) -> bool:
        """Whether the folder is a layout; one that holds other things is refused."""
        try:
            names = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            raise _not_a_layout(self.folder, "it is a file") from None
        except OSError as error:
            raise unusable(self.folder, error) from error
        if _MARK not in names and names - {NEW}:
            raise _not_a_layout(self.folder, "it holds other things")
        return _MARK in names

    def events(self) -> tuple[Event, ...]:
        """Return what happened to give this folder: all versions, executors first, and their marks. No file is read."""
        return tuple(self._index().events())

    def read(self, names: Sequence[VersionName]) -> tuple[Release, ...]:
        """Return versions with all their files, every byte of which is checked; any fault refuses them all."""
        entries = self._index().entries
        if absent := [str(name) for name in names if name not in entries]:
            raise NotFound(
                f"{self.folder} does not hold {', '.join(absent[:10])}.",
                suggestion="List what it holds, and ask for that.",
                absent=list(absent),
            )
        if not names:
            return ()
        with opened(self.folder) as folder:
            return self._releases(folder, [entries[name] for name in names])

    def write(self, releases: Sequence[Release], marks: Sequence[Event] = ()) -> tuple[Published, ...]:
        """Add versions, then say of versions what was said; what is there already stays as it is.

        Everything is checked before anything is written. Other content for a version that is there is a conflict.
        """
        self._refuse(issue for release in releases for issue in _issues(release.name, unsound(release)))
        encoded = [encode(release) for release in releases]
        entries = [Entry.of(release, artifact) for release, artifact in zip(releases, encoded, strict=True)]
        before = self._index()
        grown = before.grown(entries, marks)
        if grown is not before or not self.is_there:
            before, grown = self._grow(entries, {artifact.digest: artifact for artifact in encoded}, marks)
        return tuple(
            Published(entry.name, entry.digest, grown.closures[entry.name], entry.name not in before.entries)
            for entry in entries
        )

    def _grow(
        self, entries: Sequence[Entry], artifacts: Mapping[str, Artifact], marks: Sequence[Event]
    ) -> tuple[Index, Index]:
        """Write what is missing as the only writer, and return the index before and after."""
        with self._alone() as folder:
            before = self._index()
            grown = before.grown(entries, marks)
            new = [artifacts[entry.artifact] for name, entry in grown.entries.items() if name not in before.entries]
            data = grown.to_bytes()
            with below(folder, *_BLOBS) as blobs:
                _put_blobs(blobs, new)
            put_file(folder, _INDEX, data, is_durable=True)
            self._known = (_stamp(folder), grown)
        return before, grown

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Give the folder's descriptor to its only writer; a folder that is none yet becomes a layout."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(self.folder, error) from error
        with opened(self.folder) as folder:
            lock(folder, self.folder)
            if not self.is_there:
                put_file(folder, _MARK, canonical({"imageLayoutVersion": _VERSION}), is_durable=True)
            make_below(folder, *_BLOBS)
            yield folder

    def _index(self) -> Index:
        """Return the index as it is now, read again only where it was replaced."""
        if not self.is_there:
            return Index(str(self.folder))
        with opened(self.folder) as folder:
            stamp = _stamp(folder)
            if self._known is None or self._known[0] != stamp:
                self._known = (stamp, self._read_index(folder))
            return self._known[1]

    def _read_index(self, folder: int) -> Index:
        try:
            mark = read_json(read_file(folder, _MARK, limit=_MAX_MARK), max_bytes=_MAX_MARK, max_values=100)
        except (LookupError, NotJson) as fault:
            raise self._refused(_MARK, str(fault.args[0])) from None
        if as_object(mark).get("imageLayoutVersion") != _VERSION:
            raise self._refused(_MARK, f"it is not of version {_VERSION}")
        try:
            data = read_file(folder, _INDEX, limit=MAX_INDEX)
        except LookupError as fault:
            if _stamp(folder) == _ABSENT:  # a first write was ended before its last step
                return Index(str(self.folder))
            raise self._refused(_INDEX, str(fault.args[0])) from None
        return Index.read(data, f"{self.folder}/{_INDEX}")

    def _releases(self, folder: int, entries: Sequence[Entry]) -> tuple[Release, ...]:
        releases: list[Release] = []
        issues: list[Issue] = []
        try:
            with below(folder, *_BLOBS) as blobs:
                for entry in entries:
                    try:
                        releases.append(_release(blobs, entry))
                    except ArtifactRefused as fault:
                        issues += _issues(entry.name, iter(fault.issues))
        except OSError as error:
            raise self._refused("/".join(_BLOBS), f"it is no folder with files in it: {error.strerror}") from error
        self._refuse(iter(issues))
        return tuple(releases)

    def _refuse(self, issues: Iterator[Issue]) -> None:
        if found := [issue for issue, _ in zip(issues, range(MAX_ISSUES), strict=False)]:
            raise ArtifactRefused(str(self.folder), found)

    def _refused(self, place: str, reason: str) -> ArtifactRefused:
        return ArtifactRefused(str(self.folder), [Issue(place, reason, _AGAIN)])


_ABSENT: Stamp = (0, 0, 0, 0)


def _stamp(folder: int) -> Stamp:
    """Return what changes whenever the index does."""
    try:
        state = os.stat(_INDEX, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return _ABSENT
    return (state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino)


def _release(blobs: int, entry: Entry) -> Release:
    """Return the release of an entry, which both say the same of."""

    def read(digest: str, size: int) -> bytes:
        return read_file(blobs, digest.removeprefix("sha256:"), limit=size)

    what = str(entry.name)
    try:
        manifest = read(entry.artifact, entry.size)
    except LookupError as fault:
        raise ArtifactRefused(what, [Issue(entry.artifact, str(fault.args[0]), _AGAIN)]) from None
    if digest_of(manifest) != entry.artifact:
        raise ArtifactRefused(what, [Issue(entry.artifact, "its bytes were changed", _AGAIN)])
    release = decode(manifest, read, marks=entry.marks)
    if (Facts.of(release), release.digest) != (entry.facts, entry.digest):
        raise ArtifactRefused(what, [Issue(_INDEX, "it says other than the artifact does", _AGAIN)])
    return release


def _put_blobs(folder: int, artifacts: Sequence[Artifact]) -> None:
    # Not made durable one by one: what the disk lost of them when the power went is found missing when it is read.
    blobs = {digest: data for artifact in artifacts for digest, data in artifact.blobs.items()}
    there = set(os.listdir(folder))
    for digest, data in {**blobs, **{artifact.digest: artifact.manifest for artifact in artifacts}}.items():
        name = digest.removeprefix("sha256:")
        if name not in there or not _holds(folder, name, data):
            put_file(folder, name, data)


def _holds(folder: int, name: str, data: bytes) -> bool:
    try:
        return read_file(folder, name, limit=len(data)) == data
    except LookupError:
        return False


def _issues(name: VersionName, issues: Iterator[Issue]) -> Iterator[Issue]:
    return (replace(issue, place=f"{name} {issue.place}") for issue in issues)


def _not_a_layout(folder: Path, reason: str) -> Conflict:
    return Conflict(
        f"{folder} is not a folder in OCI image layout: {reason}.",
        suggestion="Name a folder that Kiwi wrote, or one that is empty or not there yet.",
    )
