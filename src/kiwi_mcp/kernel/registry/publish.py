"""Publishing: an item and what it stands on become versions that never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.read import load_bytes
from kiwi_mcp.catalog.release import release_of
from kiwi_mcp.domain.errors import (
    IntegrityMismatch,
    InvalidManifest,
    InvalidRequest,
    NamespaceDenied,
    VersionConflict,
    VersionSealed,
)
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    Event,
    Pin,
    Published,
    Release,
    VersionName,
    Visibility,
    is_same_executor,
)
from kiwi_mcp.domain.version import Version
from kiwi_mcp.kernel.authoring.checking import Verdict, examine
from kiwi_mcp.kernel.keys.signer import Signer, signed_files
from kiwi_mcp.kernel.registry.words import PublishWords
from kiwi_mcp.kernel.settings import is_namespace
from kiwi_mcp.manifest.signature import DETACHED
from kiwi_mcp.store.registry import Registry


@dataclass(frozen=True, slots=True)
class Publication:
    """What will be published: the item and those of its links that are not published yet, and what to say of it."""

    tool: Tool
    releases: tuple[Release, ...]
    verdict: Verdict
    shown_before: Visibility | None = None
    """Who sees the item until now, if it is published in any version."""
    signer: Signer | None = None
    """Who vouches for it."""

    @property
    def name(self) -> VersionName:
        """The name of the item's own version."""
        return self.releases[-1].name

    @property
    def visibility(self) -> Visibility:
        """Who sees the item from then on, in all of its versions."""
        return self.releases[-1].visibility

    @property
    def is_shown_otherwise(self) -> bool:
        """Whether an item that is published already is to be seen by others than until now."""
        return self.shown_before not in {None, self.visibility}


async def prepare_publication(
    item: str, words: PublishWords, catalog: Catalog, registry: Registry, signer: Signer | None = None
) -> Publication:
    """Return an item as it will be published, checked as signing would check it, and signed; nothing is written yet."""
    tool = catalog.find(item, source=words.location)
    if tool.origin.source in {"registry", "mcp", "builtin"}:
        raise VersionSealed(tool.identity)
    verdict = await examine(tool, catalog)
    verdict.demand(tool.id)
    chain = catalog.resolve(tool.identity)
    if chain.faults:
        raise InvalidManifest(tool.id, chain.faults)
    namespace = words.namespace or registry.actor.namespaces[0]
    if not is_namespace(namespace) or not registry.actor.is_member(namespace):
        raise NamespaceDenied(namespace, namespaces=registry.actor.namespaces)
    releases = tuple(_releases(chain.links, words, namespace, registry, signer))
    return Publication(tool, releases, verdict, _visibility(tool.id, namespace, registry), signer)


def publish(publication: Publication, registry: Registry) -> Sequence[Published]:
    """Publish all of it, or nothing; a version that is taken is answered with the next one that is free."""
    name = replace(publication.name, version="")
    shown = Event(0, "visibility", name, "", "", "", "", publication.visibility)
    try:
        return registry.publish(publication.releases, [shown] if publication.is_shown_otherwise else ())
    except VersionConflict as error:
        raise _with_next(error, publication.name, registry) from error


def foresee(publication: Publication, registry: Registry) -> Sequence[Published]:
    """Return what publishing would give, or the conflict it would end in; nothing is written."""
    known = {
        listed.name: listed
        for release in publication.releases
        for listed in registry.named(release.name.tool_id, namespace=release.name.namespace)
    }
    taken = [
        str(one.name)
        for one in publication.releases
        if (there := known.get(one.name))
        and not (there.digest == one.digest and is_same_executor(there.executor, one.executor))
    ]
    if taken:
        raise _with_next(VersionConflict(taken), publication.name, registry)
    return [Published(one.name, one.digest, "", is_new=one.name not in known) for one in publication.releases]


def _with_next(error: VersionConflict, name: VersionName, registry: Registry) -> VersionConflict:
    """Return a conflict that says which version is free."""
    known = [listed.name.version for listed in registry.named(name.tool_id, namespace=name.namespace)]
    if name.version in known:  # otherwise it is an executor that changed
        error.suggestion = f"{error.suggestion} The next free one is {_next(known)!r}."
    return error


def _releases(
    links: Sequence[Tool], words: PublishWords, namespace: str, registry: Registry, signer: Signer | None
) -> Sequence[Release]:
    """Return a release for each link that is in a folder, each pinned to the one below it."""
    made: list[Release] = []
    below: tuple[VersionName, str] | None = None
    for link in reversed(links):
        is_top = link is links[0]
        ref = link.manifest.executor
        pin = Pin(ref, *below) if ref and below else None
        held = _held(link, namespace, registry)
        if held is not None and not is_top:
            below = held
            continue
        # What was asked for holds for the item and for links that nobody has seen yet.
        known = _visibility(link.id, namespace, registry)
        visibility = (words.visibility or known if is_top else known or words.visibility) or "public"
        release = _release(link, namespace, pin, words.changelog if is_top else "", visibility, signer)
        made.append(release)
        below = (release.name, release.digest)
    return made


def _held(tool: Tool, namespace: str, registry: Registry) -> tuple[VersionName, str] | None:
    """Return under which name others find a link: in the registry, or with Kiwi itself."""
    digest = f"sha256:{tool.digest}"
    if tool.origin.source == "builtin":
        return VersionName(BUILTIN_NAMESPACE, tool.id, tool.manifest.version), digest
    is_published = tool.origin.source == "registry"
    wanted = tool.origin.namespace if is_published else namespace
    for listed in registry.by_digest(digest):
        if listed.name.namespace == wanted and listed.name.tool_id == tool.id:
            return listed.name, digest
    if is_published:
        raise InvalidRequest(
            f"{tool.identity} is not in the registry as it is here.",
            suggestion="Pull it from the remote that it came from.",
        )
    return None


def _release(
    tool: Tool, namespace: str, pin: Pin | None, changelog: str, visibility: Visibility, signer: Signer | None
) -> Release:
    if tool.integrity == "modified":
        expected = tool.signature.hash if tool.signature else ""
        raise IntegrityMismatch(tool.id, expected=expected, actual=tool.digest, where=str(tool.origin.path))
    if Version.parse(tool.manifest.version) is None or "+" in tool.manifest.version:
        raise InvalidRequest(
            f"{tool.id!r} has the version {tool.manifest.version!r}, which cannot be put in order.",
            suggestion='Write a semantic version without build metadata, such as `version: "1.0.0"`.',
        )
    data = {file.path: load_bytes(tool, file) for file in tool.files}
    return release_of(
        tool,
        {**data, **_signed(tool, data[tool.origin.path.name], namespace, signer)},
        namespace=namespace,
        place=tool.origin.place,
        executor=pin,
        changelog=changelog,
        visibility=visibility,
    )


def _signed(tool: Tool, data: bytes, namespace: str, signer: Signer | None) -> Mapping[str, bytes]:
    """Return the files that tell who vouches for an item in a namespace; what it bears in a folder holds there only."""
    is_apart = tool.origin.path.suffix.lower() in DETACHED
    if signer is None and not (tool.signature and (tool.signature.key or is_apart)):
        return {}
    timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return signed_files(tool, data, namespace=namespace, timestamp=timestamp, signer=signer)


def _visibility(tool_id: str, namespace: str, registry: Registry) -> Visibility | None:
    """Return the visibility that an item has already."""
    return next((listed.visibility for listed in registry.named(tool_id, namespace=namespace)), None)


def _next(versions: Sequence[str]) -> str:
    highest = max(filter(None, map(Version.parse, versions)))
    return str(Version(highest.major, highest.minor, highest.patch + (not highest.pre)))


def _done(publication: Publication, *, is_new: bool, is_planned: bool) -> str:
    would_be = "would be" if is_planned else "is"
    done = ("would be published" if is_planned else "published") if is_new else "is published already, as it is"
    if not publication.is_shown_otherwise:
        return done
    return f"{done}; with all its versions it {would_be} {publication.visibility} now, not {publication.shown_before}"


def told(publication: Publication, published: Sequence[Published], *, is_planned: bool) -> JsonObject:
    """Return what is answered to whoever published."""
    top, tool = publication.releases[-1], publication.tool
    by_name = {one.name: one for one in published}
    is_new = by_name[top.name].is_new
    shown = f"{top.name.namespace}/{tool.id}"  # to others the short name may mean another item
    answer: dict[str, Json] = {
        "tool_id": tool.id,
        "action": "publish",
        "status": "planned" if is_planned else ("published" if is_new else "unchanged"),
        "message": f"{top.name} {_done(publication, is_new=is_new, is_planned=is_planned)}",
        "identity": f"registry/{top.name}",
        "version": top.name.version,
        "namespace": top.name.namespace,
        "visibility": top.visibility,
        "digest": top.digest,
        "files": [file.path for file in top.files],
        "next": f"Others get it with `kiwi pull {shown}`; `kiwi versions {shown}` lists its history.",
    }
    if not is_planned:
        answer["closure"] = by_name[top.name].closure
    if also := [str(release.name) for release in publication.releases[:-1]]:
        answer["also_published"] = also
    notes = [issue.to_json() for issue in publication.verdict.warnings]
    if publication.signer:
        answer["signer"] = publication.signer.key.fingerprint
    elif tool.integrity == "unsigned":
        fix = f"Run `kiwi sign {tool.id}` before publishing, so that others can tell that nothing changed since."
        notes.append({"place": "", "reason": "it is not signed", "fix": fix, "severity": "warning"})
    if notes:
        answer["warnings"] = list(notes)
    return answer
