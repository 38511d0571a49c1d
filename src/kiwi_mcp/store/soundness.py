"""Soundness: what must hold of every release, wherever it came from, before any of it is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import get_args

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.paths import clashes, is_namespace, is_safe_path, is_tool_id
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Mark, Pin, Release, VersionName, Visibility, is_digest
from kiwi_mcp.domain.version import Range, Version
from kiwi_mcp.store.json_bytes import NotJson, canonical, read_json

MAX_FILES = 2_000
MAX_BYTES = 64_000_000
MAX_STATEMENT = 4_000_000
MAX_TEXT = 64_000
"""The longest changelog or reason, in characters."""
MAX_SIDECAR = 4_096
"""The most that the file may hold that tells who signed a version, in bytes."""
MAX_WORD = 400
"""The longest name of a person or reference, and how much of a wrong one is quoted."""

_KIND = "kiwi.item/1"
_KINDS = ("tools", "directives", "knowledge", "scripts")
_MAX_VALUES = 1_000_000
_MAX_VERSION = 64
_HASHED = re.compile(rb'"manifest":"([0-9a-f]{64})"')
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|\+00:00)", re.ASCII)
_BROKEN_TEXT = re.compile(r"[\x00\ud800-\udfff]")
_VISIBILITIES: tuple[Visibility, ...] = get_args(Visibility)
_AGAIN = "Publish it again from its source."


def unsound(release: Release) -> Iterator[Issue]:
    """Yield every reason not to keep a release; the manifest's own text is read elsewhere."""
    files = [(file.path, len(file.data)) for file in release.files]
    issues = [*_names(release), *_words(release), *unsafe_files(files)]
    yield from issues
    yield from _statement(release, is_clean=not issues)


def unsafe_files(files: Sequence[tuple[str, int]]) -> Iterator[Issue]:
    """Yield what is wrong with paths and sizes: unsafe, clashing, too many, too large. No bytes are needed for it."""
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
    """Yield what is wrong with the parts of a version's name."""
    if not is_namespace(name.namespace):
        yield Issue(f"{place}namespace", f"{name.namespace[:MAX_WORD]!r} cannot be a namespace", _AGAIN)
    if not is_tool_id(name.tool_id):
        yield Issue(f"{place}tool_id", f"{name.tool_id[:MAX_WORD]!r} cannot name an item", _AGAIN)
    # A version is taken only as it is written back, so that each has one spelling; build metadata has none.
    parsed = Version.parse(name.version) if len(name.version) <= _MAX_VERSION else None
    if parsed is None or str(parsed) != name.version:
        fix = "Use a semantic version without build metadata, such as 1.2.0."
        yield Issue(f"{place}version", f"{name.version[:MAX_WORD]!r} is not a version that can be published", fix)


def bad_pin(pin: Pin, namespace: str) -> Iterator[Issue]:
    """Yield what is wrong with the version that the executor of something in a namespace was when it was pinned.

    The digest of that something covers the reference and not the pin, so a pin may say no more than the reference
    does: the same name, a version that it covers, at home or with Kiwi, unless it names another place itself.
    """
    yield from bad_name(pin.name, "executor.")
    if not is_digest(pin.digest):
        yield Issue("executor.digest", f"{pin.digest[:MAX_WORD]!r} is not a digest", _AGAIN)
    yield from bad_text(pin.ref, "executor", limit=MAX_WORD)
    place, _, wanted = pin.ref[: MAX_WORD + 1].partition("@")
    home, _, tool_id = place.rpartition("/")
    if tool_id != pin.name.tool_id or not _covers(wanted, pin):
        reason = f"it asks for {pin.ref[:MAX_WORD]!r} and is pinned to {str(pin.name)[:MAX_WORD]}"
        yield Issue("executor", reason, _AGAIN)
    elif pin.name.namespace not in _homes(home, namespace):
        reason = f"it asks for {pin.ref[:MAX_WORD]!r}, which does not mean {str(pin.name)[:MAX_WORD]}"
        fix = f"Write `executor: registry/{pin.name.namespace[:MAX_WORD]}/{tool_id}` in its manifest, if that is meant."
        yield Issue("executor", reason, fix)


def _covers(wanted: str, pin: Pin) -> bool:
    """Whether a pin is to a version that a reference asks for."""
    if wanted in {"", pin.name.version, pin.digest}:
        return True
    covered, version = Range.parse(wanted), Version.parse(pin.name.version)
    return covered is not None and version is not None and covered.covers(version)


def _homes(home: str, namespace: str) -> tuple[str, ...]:
    """Return the namespaces that the executor of something in a namespace may be from."""
    source, _, named = home.partition("/")
    return (named,) if source in {"registry", "builtin"} else (namespace, BUILTIN_NAMESPACE)


def bad_mark(mark: Mark, place: str) -> Iterator[Issue]:
    """Yield what is wrong with what was said of a version."""
    if not mark.at:
        yield Issue(f"{place}.at", "it does not say when", _AGAIN)
    yield from bad_time(mark.at, f"{place}.at")
    yield from bad_text(mark.reason, f"{place}.reason")


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
    if release.executor is not None:
        yield from bad_pin(release.executor, release.name.namespace)
    if not is_safe_path(release.place) or release.place.partition("/")[0] not in _KINDS or "/" not in release.place:
        fix = f"An item stands below one of: {', '.join(_KINDS)}."
        yield Issue("place", f"{release.place[:MAX_WORD]!r} is not where an item can stand", fix)
    if release.manifest_path not in {file.path for file in release.files}:
        yield Issue("place", f"the file with the manifest, {release.manifest_path[:MAX_WORD]!r}, is missing", _AGAIN)
    beside = next((file for file in release.files if file.path == release.sidecar_path), None)
    if beside and (len(beside.data) > MAX_SIDECAR or beside.is_executable):
        yield Issue("files", f"{beside.path[:MAX_WORD]!r} is more than a signature", _AGAIN)
    if release.is_builtin and release.name.namespace != BUILTIN_NAMESPACE:
        yield Issue("is_builtin", f"nothing in {release.name.namespace[:MAX_WORD]!r} ships with Kiwi", _AGAIN)


def _words(release: Release) -> Iterator[Issue]:
    yield from bad_text(release.changelog, "changelog")
    yield from bad_text(release.published_by, "published_by", limit=MAX_WORD)
    yield from bad_time(release.created_at, "created_at")
    yield from bad_visibility(release.visibility)
    for place, mark in (("yanked", release.yanked), ("deprecated", release.deprecated)):
        if mark is not None:
            yield from bad_mark(mark, place)


def _statement(release: Release, *, is_clean: bool) -> Iterator[Issue]:
    # What is the canonical JSON of just this need not be read: only the hash of the manifest is taken from it.
    words, files, hashed = _expected_words(release), _expected_files(release), _HASHED.search(release.statement)
    if is_clean and hashed is not None:
        expected: JsonObject = {**words, "manifest": hashed[1].decode(), "files": files}
        if canonical(expected) == release.statement:
            return
    try:
        said = as_object(read_json(release.statement, max_bytes=MAX_STATEMENT, max_values=_MAX_VALUES))
    except NotJson as fault:
        yield Issue("statement", str(fault), _AGAIN)
        return
    issues = [*_misstated_words(said, words), *_misstated_files(said.get("files"), files)]
    yield from issues
    if is_clean and not issues:
        yield Issue("statement", "it is not the canonical JSON of what it says", _AGAIN)


def _misstated_words(said: JsonObject, words: JsonObject) -> Iterator[Issue]:
    for word, value in words.items():
        if (stated := said.get(word)) != value:
            told = f"its statement says {str(stated)[:MAX_WORD]!r}, the release {str(value)[:MAX_WORD]!r}"
            yield Issue(word, told, _AGAIN)
    if not is_digest(f"sha256:{as_text(said.get('manifest'))}"):
        yield Issue("manifest", "its statement holds no hash of the manifest", _AGAIN)


def _misstated_files(rows: Json, files: Sequence[JsonObject]) -> Iterator[Issue]:
    listed = {as_text(as_object(row).get("path")): as_object(row) for row in as_list(rows)}
    held = {as_text(row.get("path")): row for row in files}
    for path in sorted(listed.keys() - held.keys()):
        yield Issue("files", f"{path[:MAX_WORD]!r} is stated and missing", _AGAIN)
    for path in sorted(held.keys() - listed.keys()):
        yield Issue("files", f"{path[:MAX_WORD]!r} is there and not stated", _AGAIN)
    for path in sorted(held.keys() & listed.keys()):
        if held[path] != listed[path]:
            yield Issue("files", f"{path[:MAX_WORD]!r} is not the file that was stated", _AGAIN)


def _expected_words(release: Release) -> JsonObject:
    executor = release.executor.ref if release.executor else None
    return {"kind": _KIND, "tool_id": release.name.tool_id, "version": release.name.version, "executor": executor}


def _expected_files(release: Release) -> Sequence[JsonObject]:
    others = (file for file in release.files if file.path not in {release.manifest_path, release.sidecar_path})
    return [
        {"path": file.path, "sha256": file.sha256, "executable": file.is_executable}
        for file in sorted(others, key=lambda file: file.path)
    ]
