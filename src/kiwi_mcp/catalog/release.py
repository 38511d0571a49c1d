"""Releases: an item made ready to be published, and one that came from outside held against its own statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kiwi_mcp.catalog.folder import MANIFESTS
from kiwi_mcp.catalog.read import bad_name, integrity_of, manifest_in, with_parameters
from kiwi_mcp.domain.errors import ArtifactRefused, InvalidManifest, KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest, Signature, Tool, ToolFile
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.registry import Pin, Release, ReleaseFile, VersionName, Visibility
from kiwi_mcp.manifest.digest import statement_of
from kiwi_mcp.manifest.keys import Rotation
from kiwi_mcp.manifest.names import is_tool_id
from kiwi_mcp.manifest.sheets import Sheets
from kiwi_mcp.manifest.signature import (
    DETACHED,
    completed,
    is_apart,
    read_detached,
    read_rotations,
    sidecar,
    split,
)
from kiwi_mcp.manifest.trust import Trust, Trusted, vouch

_DATA = {".yaml", ".yml", ".json", ".toml"}


def release_of(
    tool: Tool,
    data: Mapping[str, bytes],
    *,
    namespace: str,
    place: str,
    executor: Pin | None,
    changelog: str = "",
    visibility: Visibility = "public",
) -> Release:
    """Return an item as it will be published.

    `data` holds the bytes of every file it was read with, and those of the file that tells who signed it, if there is
    one.
    """
    manifest = tool.manifest
    return Release(
        name=VersionName(namespace, manifest.tool_id, manifest.version),
        place=place,
        statement=_statement(manifest, tool.origin.path.name, data, tool.files),
        manifest=summary(manifest),
        files=(
            *(ReleaseFile(file.path, data[file.path], _is_executable(file, tool)) for file in tool.files),
            *(ReleaseFile(path, data[path]) for path in (sidecar(tool.origin.path.name),) if path in data),
        ),
        executor=executor,
        changelog=changelog,
        visibility=visibility,
    )


def check_release(release: Release, sheets: Sheets | None = None) -> Release:
    """Return a release from outside with its manifest read, or refuse it where its files say other than it does.

    The statement is made anew from the files: only if every byte is what was hashed do the two agree.
    """
    data = {file.path: file.data for file in release.files}
    try:
        manifest = _read(release, data, sheets)
    except InvalidManifest as error:
        raise ArtifactRefused(str(release.name), error.issues) from error
    except KiwiError as error:
        raise ArtifactRefused(str(release.name), [Issue("", error.message, error.suggestion)]) from error
    files = [
        ToolFile(one.path, one.sha256, len(one.data), one.is_executable)
        for one in release.files
        if one.path != release.sidecar_path
    ]
    said = (release.name.tool_id, release.name.version, release.executor.ref if release.executor else None)
    found = (manifest.tool_id, manifest.version, manifest.executor)
    issues = [
        Issue(word, f"it says {one!r}, and its manifest says {other!r}", "Publish it again from its source.")
        for word, one, other in zip(("tool_id", "version", "executor"), said, found, strict=True)
        if one != other
    ]
    if not issues and _statement(manifest, release.manifest_path, data, files) != release.statement:
        issues.append(Issue("digest", "its files are not those that were hashed", "Take it from another place."))
    if issues:
        raise ArtifactRefused(str(release.name), issues)
    return replace(release, manifest=summary(manifest))


@dataclass(frozen=True, slots=True)
class Vouched:
    """Who vouches for a release from outside, and how their key came to be."""

    trust: Trust
    signature: Signature | None = None
    rotations: tuple[Rotation, ...] = ()


def vouched(release: Release, trusted: Trusted, sheets: Sheets | None = None) -> Vouched:
    """Return who vouches for a release that was checked, in the eyes of somebody who trusts some keys."""
    data = {file.path: file.data for file in release.files}
    manifest, digest = _read(release, data, sheets), release.digest.removeprefix("sha256:")
    place = Path(release.place)
    beside = data.get(release.sidecar_path, b"").decode(errors="replace")
    signature = split(data[release.manifest_path].decode(), place.suffix)[0]
    if is_apart(place.suffix):
        is_json = place.suffix.lower() in DETACHED
        signature = read_detached(beside) if is_json else completed(signature, read_detached(beside))
    integrity = integrity_of(signature, digest, data[release.manifest_path].decode(), manifest, path=place)
    trust = vouch(manifest, digest, signature, integrity, namespace=release.name.namespace, trusted=trusted)
    return Vouched(trust, signature, read_rotations(beside))


def summary(manifest: Manifest) -> JsonObject:
    """Return a manifest in its one shape, without what is empty."""
    required: JsonObject = {
        "tool_id": manifest.tool_id,
        "tool_type": manifest.tool_type,
        "version": manifest.version,
    }
    others: JsonObject = {
        "executor": manifest.executor,
        "name": manifest.name,
        "description": manifest.description,
        "category": manifest.category,
        "tags": list(manifest.tags),
        "config": manifest.config,
        "parameters": manifest.parameters,
        "outputs": manifest.outputs,
        "requires": list(manifest.requires),
        "mutates_state": manifest.mutates_state,
        "effect": manifest.effect,
        "validation": manifest.validation,
        "env_config": manifest.env_config,
        "extra": manifest.extra,
    }
    return {**required, **{word: value for word, value in others.items() if value}}


def _read(release: Release, data: Mapping[str, bytes], sheets: Sheets | None) -> Manifest:
    place = Path(release.place)
    try:
        text = data[release.manifest_path].decode()
    except (KeyError, UnicodeDecodeError):
        raise _unreadable(release, f"there is no text file {release.manifest_path!r} in it") from None
    manifest = manifest_in(place, text, base=Path(), sheets=sheets)
    if manifest is None:
        raise _unreadable(release, f"{release.manifest_path} holds no manifest")
    if not is_tool_id(manifest.tool_id):
        raise InvalidManifest(str(release.name), [bad_name(manifest.tool_id)])
    return with_parameters(manifest, lambda name: data.get(name, b"")) if place.name in MANIFESTS else manifest


def _unreadable(release: Release, reason: str) -> InvalidManifest:
    return InvalidManifest(str(release.name), [Issue("place", reason, "Publish it again from its source.")])


def _is_executable(file: ToolFile, tool: Tool) -> bool:
    """Whether a file is to be executable; one that is all manifest has no use for it, and no digest speaks of it."""
    return file.is_executable and not (file.path == tool.origin.path.name and tool.origin.path.suffix in _DATA)


def _statement(
    manifest: Manifest, manifest_path: str, data: Mapping[str, bytes], files: tuple[ToolFile, ...] | list[ToolFile]
) -> bytes:
    _, body = split(data[manifest_path].decode(), Path(manifest_path).suffix)
    return statement_of(
        tool_id=manifest.tool_id,
        version=manifest.version,
        executor=manifest.executor,
        manifest_body=body.encode(),
        files=[file for file in files if file.path != manifest_path],
    )
