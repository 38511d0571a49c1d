"""Floors: the least that code is held by for where it comes from, and how strictly a whole chain is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import LEVELS, Level, Provenance, strictest
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.sandbox.levels import floor


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that one link is held by, and where it comes from."""

    identity: str
    provenance: Provenance
    level: Level

    def to_json(self) -> JsonObject:
        """Return it as `why` shows it."""
        return {"identity": self.identity, "provenance": self.provenance, "floor": self.level}


@dataclass(frozen=True, slots=True)
class Holding:
    """How strictly a chain is held, and what decided it."""

    level: Level
    asked: Level
    """The strictest that its manifests ask for; `trusted` where none does."""
    floors: tuple[Floor, ...]
    relaxed: Level | None = None
    """What the owner lets it run under, in place of its floors."""
    deployed: Level | None = None
    """The least that whoever runs this machine has every process held by, where that decides."""
    is_looked_up: bool = True
    """Whether it could be found out where its links come from."""

    @property
    def decisive(self) -> Floor:
        """The link with the strictest floor, the highest one where several have it."""
        return max(self.floors, key=lambda one: LEVELS.index(one.level))

    @property
    def provenance(self) -> Provenance:
        """Where the chain comes from, for how it is held: from where its least trusted link does, or from its owner."""
        if self.relaxed is not None:
            return "owner_pinned" if self.relaxed == "trusted" else "owner_relaxed"
        return self.decisive.provenance

    @property
    def is_asked(self) -> bool:
        """Whether its own manifests ask for more than its origin does."""
        least = self.relaxed or self.decisive.level
        return strictest([least, self.asked]) != least

    @property
    def _decided_by(self) -> str:
        if self.deployed:
            return "deployment"
        return "manifest" if self.is_asked else "owner" if self.relaxed else self.decisive.identity

    def to_json(self) -> JsonObject:
        """Return it as `why` shows it."""
        return {
            "level": self.level,
            "asked": self.asked,
            "provenance": self.provenance,
            "decided_by": self._decided_by,
            "floors": [one.to_json() for one in self.floors],
            **({"relaxed_to": self.relaxed} if self.relaxed else {}),
        }


def held(chain: Chain, origins: Sequence[Provenance], relaxed: Level | None = None) -> Holding:
    """Return how a chain is held whose links come from there: the strictest of their floors and of what they ask for.

    What the owner said of exactly this chain stands in place of the floors; what its manifests ask for still counts.
    """
    floors = tuple(
        Floor(link.identity, origin, floor(origin)) for link, origin in zip(chain.links, origins, strict=True)
    )
    least = [relaxed] if relaxed is not None else [one.level for one in floors]
    return Holding(strictest([*least, chain.isolation]), chain.isolation, floors, relaxed)


def raised(holding: Holding, least: Level | None) -> Holding:
    """Return how a chain is held where whoever runs this machine has every process held by some level at least."""
    if least is None or strictest([holding.level, least]) == holding.level:
        return holding
    return replace(holding, level=least, deployed=least)


def unproven(chain: Chain) -> Holding:
    """Return how a chain is held of which nothing is known but what ships with Kiwi."""
    return held(chain, ["builtin" if link.origin.source == "builtin" else "unknown" for link in chain.links])


def remedy(provenance: Provenance, identity: str) -> str:
    """Return what the owner can do where an item is held too strictly for this machine, or for what it does."""
    if provenance != "unknown":
        return ""
    name = identity.partition("@")[0].rpartition("/")[2]
    if identity.startswith("registry/"):
        return f"Nobody you trust has signed {name}: read it, then trust the key of its publisher."
    return f"Nobody is known to have written {name}: if it is yours, `kiwi sign {name}`."


def with_remedy(refused: IsolationUnavailable, provenance: Provenance, tool: Tool) -> IsolationUnavailable:
    """Return a refusal that says first what the owner can do about where the code comes from."""
    refused.suggestion = f"{remedy(provenance, tool.identity)} {refused.suggestion}".strip()
    return refused


def change_of(tool: Tool, holding: Holding) -> str:
    """Return what would change how strictly a tool is held; empty where nothing has to."""
    if holding.deployed:
        return f"This machine holds every process by {holding.deployed} at least; no owner changes that."
    if holding.is_asked:
        return f"A manifest of its chain asks for {holding.asked}; it counts until its author takes the word out."
    if holding.relaxed:
        return f"The owner relaxed exactly this content; an edit ends that, and so does `kiwi relax {tool.id} --undo`."
    if told := remedy(holding.provenance, holding.decisive.identity):
        return told
    least = LEVELS[0]
    return "" if holding.level == least else f"The owner can let it run less strictly: `kiwi relax {tool.id}`."
