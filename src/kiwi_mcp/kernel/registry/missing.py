"""Refusals about published versions, in the words of whoever asked: what is not there, and what is in the way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.refs import Ref
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NotFound, ToolNotFound, VersionConflict
from kiwi_mcp.domain.json import as_list, as_text
from kiwi_mcp.domain.registry import Listed, VersionName
from kiwi_mcp.kernel.registry.port import FolderRemote, RegistryRemote, Remote
from kiwi_mcp.kernel.registry.publish import Publication
from kiwi_mcp.kernel.registry.sync import told_of
from kiwi_mcp.kernel.registry.told import Told, Wanted
from kiwi_mcp.kernel.requests import Where
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.store.registry import Registry

_FOLDERS: tuple[Where, ...] = ("project", "user")
_LOOKED_AT = 10_000


def unpublished(item: str, catalog: Catalog, registry: Registry) -> KiwiError:
    """Return why nothing published answers to a name: it is in a folder, in another namespace, or nowhere."""
    ref = Ref.parse(item)
    if elsewhere := registry.named(ref.name):
        home = elsewhere[0].name
        return NotFound(
            f"The namespace {ref.namespace!r} has no {ref.name!r}.",
            suggestion=f"Did you mean `{home.namespace}/{home.tool_id}`?",
            tool_id=ref.name,
        )
    for source in _FOLDERS:
        with suppress(KiwiError):
            tool = catalog.find(ref.name, source=source)
            return NotFound(
                f"{ref.name!r} is not published yet ({tool.origin.path}).",
                suggestion=f"Publish it with `kiwi publish {ref.name}`.",
                tool_id=ref.name,
            )
    published = {listed.name.tool_id for listed in registry.find(limit=_LOOKED_AT)}
    near = did_you_mean(ref.name, published).split("`")[1:2]
    return ToolNotFound(ref.name, near=near or catalog.near(ref.name))


async def choose(wanted: Wanted, source: Remote, namespaces: Sequence[str]) -> VersionName:
    """Return the version of a source that is meant; where there is none, what was perhaps meant is told."""
    told = await told_of(source, wanted)
    try:
        return wanted.choose(told, namespaces)
    except NotFound as error:
        if yanked := _yanked(wanted, told, namespaces):
            raise NotFound(
                f"The registry has no {str(wanted)!r} that is in use; yanked: {', '.join(map(str, yanked))}.",
                suggestion=f"Name one exactly to have it all the same: `kiwi pull {yanked[0]}`.",
                wanted=str(wanted),
            ) from error
        # A log that comes over the network page by page is too much to read for a hint.
        if not told.versions and wanted.tool_id and isinstance(source, RegistryRemote | FolderRemote):
            names = {name.tool_id for name in Told.by(await source.events()).versions}
            error.suggestion = did_you_mean(wanted.tool_id, names) + error.suggestion
        raise


def _yanked(wanted: Wanted, told: Told, namespaces: Sequence[str]) -> list[VersionName]:
    """Return the versions that would do if nobody had yanked them, the newest first."""
    homes = (wanted.namespace,) if wanted.namespace else namespaces
    found = [name for name in told.versions if name.tool_id == wanted.tool_id and name.namespace in homes]
    return [name for name in reversed(found) if told.is_yanked(name)]


def demand_exact(item: str, found: Sequence[Listed]) -> None:
    """Refuse to take versions out of use by anything but an exact name."""
    ref = Ref.parse(item)
    if not ref.is_exactly(found[0]):
        covered = ", ".join(f"`{listed.name}`" for listed in found)
        raise InvalidRequest(
            f"Yanking takes one version out of use, and {item!r} is not the exact name of one.",
            suggestion=f"Name one of those that it covers: {covered}.",
        )


async def refuse_taken(publication: Publication, target: Remote) -> None:
    """Refuse to publish what a remote has already with other content; nothing was sealed anywhere."""
    for release in publication.releases:
        name, digest = release.name, release.digest
        told = await told_of(target, Wanted.parse(str(name)))
        if told.versions.get(name, digest) != digest:
            error = VersionConflict([str(name)])
            error.message = f"{target.key} has {name} already, with other content; nothing was published."
            raise error


def half_published(error: KiwiError, name: VersionName, remote: str) -> KiwiError:
    """Return the error for a version that is sealed here and did not get to a remote."""
    error.message = f"{name} is published here, and was not sent to {remote}: {error.message}"
    again = f"`kiwi publish {name.tool_id} --namespace {name.namespace} --to {remote}`"
    error.suggestion = f"{error.suggestion} Then send it with {again}; what is published here stays as it is."
    return error


def another_here(error: VersionConflict, registry: Registry) -> VersionConflict:
    """Return a conflict in the words of whoever pulls: they have another version of that name."""
    names = [as_text(name) for name in as_list(error.details.get("conflicts"))]
    held = [_held(name, registry) for name in names]
    error.message = f"You have another {', '.join(filter(None, held)) or ', '.join(names)} here, and it stays."
    error.suggestion = (
        "One registry cannot hold both. Pull another version, or ask its publisher for one with a number of its own; "
        "if yours is the one that should change, publish it under a new version and tell others to use that."
    )
    return error


def _held(name: str, registry: Registry) -> str:
    wanted = Wanted.parse(name)
    for listed in registry.named(wanted.tool_id, namespace=wanted.namespace):
        if listed.name.version == wanted.version:
            by = f" by {listed.published_by}" if listed.published_by else ""
            return f"{name} (published{by} on {listed.created_at[:10]})"
    return name
