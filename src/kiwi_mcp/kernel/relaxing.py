"""The relax verb: which chains their owner lets run less strictly than their origin says, and changing that.

What is relaxed is one exact chain in one place, with every byte of it and of the files that its commands name; what
comes after an edit is another one, and so is a copy in another project.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NotFound, PolicyDenied
from kiwi_mcp.domain.isolation import LEVELS, Level
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.times import moment
from kiwi_mcp.kernel.confining import of_server
from kiwi_mcp.kernel.provenance import Origins, chain_digest, home_of, may_relax
from kiwi_mcp.kernel.requests import RelaxRequest
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.watching import watched
from kiwi_mcp.kernel.why import explain_holding
from kiwi_mcp.manifest.check import HELD
from kiwi_mcp.policy.authorize import verify
from kiwi_mcp.policy.deployment import minimum
from kiwi_mcp.policy.floors import Holding, held, remedy
from kiwi_mcp.store.authors import Relaxation

_SERVED = "mcp"
_OUTSIDE: tuple[Level, ...] = ("trusted", "standard")


def relax(request: RelaxRequest, catalog: Catalog, store: Store, origins: Origins, *, is_owner: bool) -> JsonObject:
    """Answer one request about what is relaxed."""
    if not is_owner:
        raise PolicyDenied(
            "Only the owner says what may run less strictly.",
            suggestion=f"Ask them to type `kiwi relax {request.item_id or 'NAME'}`."[:200],
        )
    if request.action == "list":
        return {"action": "list", "relaxed": [_row(one, catalog) for one in store.authors().relaxations()]}
    if not request.item_id:
        raise InvalidRequest("The request names no item.", suggestion="Send `item_id`.")
    if request.action == "undo":
        return _undone(request.item_id, store)
    return _relaxed(request, _process_of(catalog.resolve(request.item_id), catalog), store, origins)


def holds(one: Relaxation, catalog: Catalog) -> bool:
    """Whether what was relaxed is what would run here under its name."""
    try:
        return chain_digest(_process_of(catalog.resolve(one.identity), catalog)) == one.chain
    except KiwiError:
        return False


def _process_of(chain: Chain, catalog: Catalog) -> Chain:
    """Return the links of a chain that run as one process: a server's own, for whatever it offers."""
    if chain.tool.origin.source == "mcp":
        return of_server(chain)
    is_server = catalog.sheets.carries(chain.tool.manifest.tool_type, _SERVED)
    return replace(chain, driver=_SERVED) if is_server else chain


def _row(one: Relaxation, catalog: Catalog) -> JsonObject:
    return {**one.to_json(), "holds": holds(one, catalog)}


def _relaxed(request: RelaxRequest, chain: Chain, store: Store, origins: Origins) -> JsonObject:
    tool, level = chain.tool, request.to
    verify(chain, (), is_frozen=False)
    before = origins.held(chain)
    _refuse(chain, before, level)
    told: dict[str, Json] = {"tool_id": tool.id, "action": "apply", "identity": tool.identity, "digest": tool.digest}
    if LEVELS.index(before.level) <= LEVELS.index(level):
        message = f"{tool.id} runs under {before.level} already"
        return {**told, "status": "unchanged", "level": before.level, "message": message}
    said, home = (level, request.reason, store.actor.name, moment()), next(filter(None, map(home_of, chain.links)), "")
    one = Relaxation(chain_digest(chain), tool.identity, tool.digest, *said, home and str(Path(home).parent))
    store.authors().relax(one)
    after = held(chain, [link.provenance for link in before.floors], level)
    warnings: list[Json] = [f"under {level} it sees and reaches what you do"] if level in _OUTSIDE else []
    if level in _OUTSIDE and (chain.driver == _SERVED or tool.manifest.mutates_state or chain.needs.write):
        named = f"'mcp/{tool.id}/*'" if chain.driver == _SERVED else tool.id
        warnings.append(f"what changes things asks you first; for a standing yes: `kiwi approvals rules add {named}`")
    if beside := [path for path, _ in watched(chain)]:
        warnings.append(f"an edit of {', '.join(beside)} ends it too; files beside those, and modules, are not watched")
    return {
        **told,
        "status": "relaxed",
        "level": after.level,
        "message": f"{tool.id} runs under {after.level} from now on, as it is now; an edit ends that",
        "isolation": explain_holding(tool, after),
        **({"warnings": warnings} if warnings else {}),
    }


def _refuse(chain: Chain, before: Holding, level: Level) -> None:
    """Refuse what an owner cannot relax: what nothing holds, what asks for more itself, and what nobody vouches for."""
    tool = chain.tool
    if chain.driver not in {HELD, _SERVED} or chain.primitive.id != "subprocess":
        raise InvalidRequest(
            f"{tool.id!r} starts no process of its own, so nothing holds it.",
            suggestion="What it may reach is said in policy.yaml of the user space.",
            tool_id=tool.id,
        )
    least = minimum()
    if least is not None and LEVELS.index(least) > LEVELS.index(level):
        raise PolicyDenied(
            f"This machine holds every process by {least!r} at least, so nothing is relaxed to {level!r}.",
            suggestion="Ask whoever runs this machine: the floor stands in its deployment.",
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
            f"Nobody is known to stand behind {strange.identity}, so nothing runs it outside of a sandbox.",
            suggestion=f"{remedy('unknown', strange.identity)} Or relax it to `sandboxed`.",
            tool_id=tool.id,
        )


def _undone(item: str, store: Store) -> JsonObject:
    authors, named = store.authors(), item.partition("@")[0]
    gone = [one for one in authors.relaxations() if _is_named(one.identity, named)]
    if not gone:
        raise NotFound(f"Nothing by the name {item!r} is relaxed.", suggestion="`kiwi relax --list` shows what is.")
    authors.tighten([one.chain for one in gone])
    identities = ", ".join(dict.fromkeys(one.identity for one in gone))
    return {
        "action": "undo",
        "item_id": item,
        "status": "undone",
        "message": f"{identities} is held as its origin says again",
        "undone": [one.to_json() for one in gone],
    }


def _is_named(identity: str, named: str) -> bool:
    full = identity.partition("@")[0]
    return named in {full, full.partition("/")[2], full.rpartition("/")[2]}
