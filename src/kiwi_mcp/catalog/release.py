"""An item as a release, the one check of a release from elsewhere, and the releases that ship with Kiwi."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from msgspec.structs import replace

import kiwi_mcp
from kiwi_mcp.catalog.item_reader import (
    MANIFESTS,
    bad_name,
    integrity_of,
    load_bytes,
    manifest_in,
    read_tool,
    with_parameters,
)
from kiwi_mcp.domain.errors import ArtifactRefused, InvalidManifest, KiwiError, VersionConflict
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest, Tool, ToolFile
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.names import is_tool_id
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    Cursor,
    Pin,
    Release,
    ReleaseFile,
    VersionName,
    Visibility,
    is_same_content,
)
from kiwi_mcp.manifest.signatures import (
    DETACHED,
    has_sidecar,
    read_detached,
    read_rotations,
    sidecar,
    signature_form,
    split,
    statement_of,
    with_sidecar,
)
from kiwi_mcp.manifest.trust import ReleaseTrust, Trusted, vouch
from kiwi_mcp.manifest.type_specs import TypeSpecs, load_type_specs
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease, order

_REQUIRED = ("tool_id", "tool_type", "version")
_OPTIONAL = (
    "executor", "name", "description", "category", "tags", "config", "parameters", "outputs", "requires",
    "mutates_state", "effect", "validation", "env_config", "extra",
)  # fmt: skip
"""The fields of a published manifest; optional ones are left out if they are empty."""
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
    references: tuple[Pin, ...] = (),
) -> Release:
    """Return an item as it will be published; `data` holds the bytes of its files and of its signature file."""
    manifest = tool.manifest
    # A file that is only a manifest is not executable: its digest does not cover that.
    plain = tool.origin.path.name if tool.origin.path.suffix in _DATA else ""
    return Release(
        name=VersionName(namespace, manifest.tool_id, manifest.version),
        place=place,
        statement=_statement(manifest, tool.origin.path.name, data, tool.files),
        manifest=summary(manifest),
        files=(
            *(
                ReleaseFile(file.path, data[file.path], file.is_executable and file.path != plain)
                for file in tool.files
            ),
            *(ReleaseFile(path, data[path]) for path in (sidecar(tool.origin.path.name),) if path in data),
        ),
        executor=executor,
        changelog=changelog,
        visibility=visibility,
        references=references,
    )


def check_release(release: Release, sheets: TypeSpecs | None = None) -> CheckedRelease:
    """Return a release from outside with its manifest read; refuse it if its files do not have its digest."""
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
    stated = (release.name.tool_id, release.name.version, release.executor.ref if release.executor else None)
    found = (manifest.tool_id, manifest.version, manifest.executor)
    issues = [
        Issue(field, f"it says {one!r}, and its manifest says {other!r}", "Publish it again from its source.")
        for field, one, other in zip(("tool_id", "version", "executor"), stated, found, strict=True)
        if one != other
    ]
    if not issues and _statement(manifest, release.manifest_path, data, files) != release.statement:
        issues.append(Issue("digest", "its files are not those that were hashed", "Take it from another place."))
    if issues:
        raise ArtifactRefused(str(release.name), issues)
    return CheckedRelease.of(release).with_manifest(summary(manifest))


def trust_of_release(release: Release, trusted: Trusted, sheets: TypeSpecs | None = None) -> ReleaseTrust:
    """Return who vouches for a release that was checked, given a set of trusted keys."""
    data = {file.path: file.data for file in release.files}
    manifest, digest = _read(release, data, sheets), release.digest.removeprefix("sha256:")
    place = Path(release.place)
    form = signature_form(place)
    beside = data.get(release.sidecar_path, b"").decode(errors="replace")
    signature = split(data[release.manifest_path].decode(), form)[0]
    if has_sidecar(form):
        is_json = form.lower() in DETACHED
        signature = read_detached(beside) if is_json else with_sidecar(signature, read_detached(beside))
    integrity = integrity_of(signature, digest, data[release.manifest_path].decode(), manifest, path=place)
    trust = vouch(manifest, digest, signature, integrity, namespace=release.name.namespace, trusted=trusted)
    return ReleaseTrust(trust, signature, read_rotations(beside))


def summary(manifest: Manifest) -> JsonObject:
    """Return a manifest in its canonical form, without empty fields."""
    found = {word: getattr(manifest, word) for word in (*_REQUIRED, *_OPTIONAL)}
    return {
        word: list(value) if isinstance(value, tuple) else value
        for word, value in found.items()
        if value or word in _REQUIRED
    }


def _read(release: Release, data: Mapping[str, bytes], sheets: TypeSpecs | None) -> Manifest:
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


def _statement(
    manifest: Manifest, manifest_path: str, data: Mapping[str, bytes], files: tuple[ToolFile, ...] | list[ToolFile]
) -> bytes:
    _, body = split(data[manifest_path].decode(), signature_form(Path(manifest_path)))
    return statement_of(
        tool_id=manifest.tool_id,
        version=manifest.version,
        executor=manifest.executor,
        manifest_body=body.encode(),
        files=[file for file in files if file.path != manifest_path],
    )


BUILTIN = Path(kiwi_mcp.__file__).parent / "data"
"""The folder of what ships with Kiwi."""

OFFICIAL = BUILTIN / "registry"
"""The folder of the items that are in every registry and in no installation's own catalog."""

_CREATED_AT = "2026-01-01T00:00:00.000Z"
"""The same in every registry, whenever it was seeded: so exports of the same versions are the same bytes."""


def seed(registry: Registry, release: str) -> None:
    """Publish the items of this release of Kiwi, once for each registry.

    A name that is already taken is left as it is, and `unseeded` reports it. So no content of a registry can prevent it
    from being opened, and items that ship with Kiwi are never run from a registry.
    """
    source = f"kiwi:{release}"
    if registry.cursor(source).seq:
        return
    releases = _checked_seeds()
    try:
        registry.publish(releases, is_seeding=True)
    except VersionConflict:
        taken = {*unseeded(registry)}
        registry.publish([one for one in releases if one.name not in taken], is_seeding=True)
    registry.set_cursor(source, Cursor(registry.head()))


def unseeded(registry: Registry) -> Sequence[VersionName]:
    """Return the names of this release of Kiwi under which a registry holds something else."""
    stored = {one.name: one for one in registry.find(namespace=BUILTIN_NAMESPACE, is_all_versions=True)}
    return [one.name for one in _checked_seeds() if (known := stored.get(one.name)) and not is_same_content(known, one)]


@cache
def shipped_digests() -> frozenset[str]:
    """Return the digests of all that this release of Kiwi brings along."""
    return frozenset(release.digest for release in _checked_seeds())


@cache
def _checked_seeds() -> tuple[CheckedRelease, ...]:
    return tuple(map(CheckedRelease.of, seeds()))


def seeds() -> Sequence[Release]:
    """Return a release of each item, executors before the items that use them."""
    links, servers = _items(BUILTIN), _items(OFFICIAL)
    names = {tool.id: VersionName(BUILTIN_NAMESPACE, tool.id, tool.manifest.version) for tool in links}
    pins = {tool.id: Pin(tool.id, names[tool.id], f"sha256:{tool.digest}") for tool in links}
    shipped = (replace(_release(tool, pins), is_builtin=True) for tool in links)
    return order((*shipped, *(_release(tool, pins) for tool in servers)))


def _items(base: Path) -> Sequence[Tool]:
    paths = sorted((base / "tools").rglob("*.yaml"))
    return [read_tool(path, source="builtin", base=base, sheets=load_type_specs()) for path in paths]


def _release(tool: Tool, pins: dict[str, Pin]) -> Release:
    executor = tool.manifest.executor
    made = release_of(
        tool,
        {file.path: load_bytes(tool, file) for file in tool.files},
        namespace=BUILTIN_NAMESPACE,
        place=tool.origin.place,
        executor=replace(pins[tool.manifest.executor_id or ""], ref=executor) if executor else None,
    )
    return replace(made, is_official=True, published_by=BUILTIN_NAMESPACE, created_at=_CREATED_AT)
