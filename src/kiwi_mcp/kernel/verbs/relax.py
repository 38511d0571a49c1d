"""relax: let a tool run less strictly than its origin demands; undo that; list such tools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NotFound, PolicyDenied
from kiwi_mcp.domain.isolation import LEVELS, Level
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.times import moment
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.pipeline import lost_links
from kiwi_mcp.kernel.provenance import Provenances, chain_digest, home_of, may_relax
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.verb import OWNER, AnyJson, Argument, NameText, Option, ProjectRequest, Response, filled, verb
from kiwi_mcp.kernel.verbs.why import explain_holding
from kiwi_mcp.kernel.view import ViewItem, rows
from kiwi_mcp.policy.authorize import verify
from kiwi_mcp.policy.isolation import IsolationDecision, decide_isolation, external_code, remedy
from kiwi_mcp.policy.policy_files import minimum
from kiwi_mcp.store.authors import Relaxation


class RelaxedTool(Response, frozen=True, kw_only=True):
    """One relaxed tool; `holds` says whether it is what would run here under its name."""

    identity: str
    digest: str
    level: str
    reason: str
    actor: str
    at: str
    project: str | UnsetType = UNSET
    holds: bool | UnsetType = UNSET


class RelaxListResponse(Response, frozen=True, kw_only=True):
    """The tools that run less strictly than their origin demands."""

    action: str = "list"
    relaxed: list[RelaxedTool]


def _list_view(response: RelaxListResponse) -> Iterator[ViewItem]:
    lines = (
        f"{one.identity}  {one.level}  {one.at[:10]}"
        f"{f'  {one.reason}' if one.reason else ''}{'' if one.holds else '  (not as it is here)'}"
        for one in response.relaxed
    )
    return rows(lines, "Nothing is relaxed: every item runs at the level of its origin.")


@verb(
    "relaxed", group="tool", wire=("relax", "list"), access=OWNER, records=False, is_local=True,
    aliases=("relax", "relax --list"), shows=_list_view,
)  # fmt: skip
async def list_relaxed(request: ProjectRequest, context: VerbContext) -> RelaxListResponse:
    """List the tools that run less strictly than their origin demands."""
    return await asyncio.to_thread(_listed, context.services.store, context.services.catalogs.of(request.project_path))


def _listed(store: Store, catalog: Catalog) -> RelaxListResponse:
    found = store.authors().relaxations()
    return RelaxListResponse(relaxed=[filled(RelaxedTool, one, holds=holds(one, catalog)) for one in found])


def holds(one: Relaxation, catalog: Catalog) -> bool:
    """Whether what was relaxed is what would run here under its name."""
    try:
        process = catalog.resolve(one.identity).process
        return process is not None and chain_digest(process) == one.chain
    except KiwiError:
        return False


class UnrelaxRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which tool."""

    item_id: Annotated[NameText, Argument("A tool, by any of its names.", "ITEM")]


class RelaxRequest(UnrelaxRequest, frozen=True, kw_only=True):
    """Which tool, to which level, and why."""

    to: Annotated[
        Literal["trusted", "standard", "sandboxed"], Option("trusted, standard or sandboxed.", metavar="LEVEL")
    ] = "standard"
    reason: Annotated[NameText, Option("Why, for the record.")] = ""


class RelaxResponse(Response, frozen=True, kw_only=True):
    """The tool, and the level that it runs under now."""

    tool_id: str
    action: str = "apply"
    identity: str
    digest: str
    status: str
    level: str
    message: str
    isolation: AnyJson | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


@verb(
    "relax",
    group="tool",
    wire=("relax", "apply"),
    access=OWNER,
    needs_receipt=True,
    is_local=True,
    aliases=("relax ITEM",),
)
async def relax_tool(request: RelaxRequest, context: VerbContext) -> RelaxResponse:
    """Let a tool, exactly as it is now, run less strictly than its origin demands."""
    services = context.services
    catalog = services.catalogs.of(request.project_path)
    return await asyncio.to_thread(_relaxed, request, catalog, services.store, services.provenance)


def _relaxed(request: RelaxRequest, catalog: Catalog, store: Store, origins: Provenances) -> RelaxResponse:
    whole = catalog.resolve(request.item_id)
    chain = whole.process
    if chain is None:
        raise InvalidRequest(
            f"{whole.tool.id!r} starts no process of its own, so it runs in no sandbox.",
            suggestion="What it may reach is set in policy.yaml of the user space.",
            tool_id=whole.tool.id,
        )
    verify(chain, (), lost_links(chain, catalog.space, origins.held), is_frozen=False)
    tool, level = chain.tool, request.to
    before = origins.held(chain)
    _refuse(chain, before, level)
    response = RelaxResponse(
        tool_id=tool.id,
        identity=tool.identity,
        digest=tool.digest,
        status="unchanged",
        level=before.level,
        message=f"{tool.id} runs under {before.level} already",
    )
    if LEVELS.index(before.level) <= LEVELS.index(level):
        return response
    home = next(filter(None, map(home_of, chain.links)), "")
    store.authors().relax(
        Relaxation(
            chain=chain_digest(chain),
            identity=tool.identity,
            digest=tool.digest,
            level=level,
            reason=request.reason,
            actor=store.actor.name,
            at=moment(),
            project=str(Path(home).parent) if home else "",
        )
    )
    after = decide_isolation(chain, [link.provenance for link in before.floors], level)
    return replace(
        response,
        status="relaxed",
        level=after.level,
        message=f"{tool.id} runs under {after.level} from now on, as it is now; an edit ends that",
        isolation=explain_holding(tool, after),
        warnings=_warnings(chain, level) or UNSET,
    )


def _warnings(chain: Chain, level: Level) -> list[str]:
    tool, is_outside = chain.tool, level in {"trusted", "standard"}
    warnings = [f"under {level} it sees and reaches what you do"] if is_outside else []
    if is_outside and (chain.server or tool.manifest.mutates_state or chain.needs.write):
        named = f"'mcp/{tool.id}/*'" if chain.server else tool.id
        warnings.append(f"what changes things asks you first; for a standing yes: `kiwi approvals rules add {named}`")
    if beside := [path for path, _ in external_code(chain)]:
        warnings.append(f"an edit of {', '.join(beside)} ends it too; files beside those, and modules, are not watched")
    return warnings


def _refuse(chain: Chain, before: IsolationDecision, level: Level) -> None:
    """Refuse what an owner cannot relax: a stricter level that is required, or code of unknown origin."""
    tool = chain.tool
    least = minimum()
    if least is not None and LEVELS.index(least) > LEVELS.index(level):
        raise PolicyDenied(
            f"This machine holds every process by {least!r} at least, so nothing is relaxed to {level!r}.",
            suggestion="Ask the administrator of this machine: the minimum level is in its deployment file.",
            tool_id=tool.id,
        )
    if LEVELS.index(before.asked) > LEVELS.index(level):
        raise InvalidRequest(
            f"A manifest of its chain asks for {before.asked}, which counts whatever its owner says of {tool.id!r}.",
            suggestion="Take the word `isolation` out of the manifest, if that is yours to do.",
            tool_id=tool.id,
        )
    if not may_relax([link.provenance for link in before.floors], level):
        strange = next(
            link for link, one in zip(chain.links, before.floors, strict=True) if one.provenance == "unknown"
        )
        raise PolicyDenied(
            f"The origin of {strange.identity} is unknown, so it runs only in a sandbox.",
            suggestion=f"{remedy('unknown', strange.identity)} Or relax it to `sandboxed`.",
            tool_id=tool.id,
        )


class UnrelaxResponse(Response, frozen=True, kw_only=True):
    """What is relaxed no longer."""

    action: str = "undo"
    item_id: str
    status: str = "undone"
    message: str
    undone: list[RelaxedTool]


@verb("unrelax", group="tool", wire=("relax", "undo"), access=OWNER, is_local=True, aliases=("relax --undo",))
async def unrelax_tool(request: UnrelaxRequest, context: VerbContext) -> UnrelaxResponse:
    """Run a tool as strictly as its origin demands again."""
    context.services.catalogs.of(request.project_path)  # refuses a project that cannot be used
    return await asyncio.to_thread(_undone, request.item_id, context.services.store)


def _undone(item: str, store: Store) -> UnrelaxResponse:
    authors, named = store.authors(), item.partition("@")[0]
    gone = [one for one in authors.relaxations() if _is_named(one.identity, named)]
    if not gone:
        raise NotFound(f"Nothing by the name {item!r} is relaxed.", suggestion="`kiwi relax --list` shows what is.")
    authors.tighten([one.chain for one in gone])
    identities = ", ".join(dict.fromkeys(one.identity for one in gone))
    return UnrelaxResponse(
        item_id=item,
        message=f"{identities} runs at the level of its origin again",
        undone=[filled(RelaxedTool, one) for one in gone],
    )


def _is_named(identity: str, named: str) -> bool:
    full = identity.partition("@")[0]
    return named in {full, full.partition("/")[2], full.rpartition("/")[2]}
