"""A chain: a tool and all it stands on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.isolation import Level, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.needs import Needs, together


@dataclass(frozen=True, slots=True)
class Chain:
    """The links from a tool down to a primitive, and what its user should know of them.

    `driver` is the word of the tool's type sheet that says how it is run; empty when it cannot be run.
    """

    links: tuple[Tool, ...]
    driver: str
    shadowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What publishers said of links after they were published: deprecated, yanked."""
    drift: tuple[str, ...] = ()
    """How the chain differs from the one its tool was published on."""
    faults: tuple[Issue, ...] = ()
    """What links say that their types do not allow; such a chain is not run."""
    project: Path | None = None
    """The project it was resolved for, which its words may name."""

    @property
    def tool(self) -> Tool:
        """The item that was asked for."""
        return self.links[0]

    @property
    def executor(self) -> Tool:
        """The link directly below the tool, or the tool itself where nothing stands below."""
        return self.links[1] if len(self.links) > 1 else self.links[0]

    @property
    def primitive(self) -> Tool:
        """The bottom of the chain."""
        return self.links[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """The short names, top to bottom."""
        return tuple(link.id for link in self.links)

    @property
    def isolation(self) -> Level:
        """How strictly its process is held: the strictest that a link asks for, `trusted` where none does."""
        return strictest(["trusted", *(asked for link in self.links if (asked := link.manifest.isolation) is not None)])

    @property
    def needs(self) -> Needs:
        """What of the owner's its links ask for together."""
        return together(link.manifest.needs for link in self.links)

    def to_json(self) -> list[JsonObject]:
        """Return the chain as surfaces show it."""
        return [
            {
                "tool_id": link.id,
                "identity": link.identity,
                "tool_type": link.manifest.tool_type,
                "version": link.manifest.version,
                "digest": link.digest,
                "integrity": link.integrity,
                **({"trust": link.trust} if link.trust else {}),
                **({"signer": link.signer} if link.signer else {}),
                "path": str(link.origin.path),
            }
            for link in self.links
        ]
