"""A store that knows the tools of some servers, as though each had been added and had listed them; a kernel on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerListing, ServerRecord
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.mcp_servers import merged, offers_of
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.manifest.mcp.server_entry import id_for
from kiwi_mcp.search.recall_log import RecallLog
from kiwi_mcp.store.mcp_definitions import McpDefinitions, ServerDefinitions
from labelled import Listed

_OWNER = Caller(is_owner=True)
_GLANCE, _PATIENCE = 0.2, 3_600.0
_AT_ONCE = 500
"""How many uses are told before they are waited for."""
_SEEN = "2026-01-01T00:00:00+00:00"


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of a user who has nothing but what the store knows."""

    folder: Path

    @property
    def space(self) -> Space:
        """Where a kernel looks."""
        return Space(project=self.folder / "project", user=self.folder / "user", cache=self.folder / "cache")

    def kernel(self) -> Kernel:
        """Return a kernel of the owner's."""
        space = self.space
        for path in (space.project / ".ai", space.user, space.cache):
            path.mkdir(parents=True, exist_ok=True)
        return Kernel(space.project, user=space.user, cache=space.cache)


def stock(place: Place, tools: Sequence[Listed]) -> Mapping[str, str]:
    """Let the store know exactly these tools, and return what whoever gave them calls each item, by its full name."""
    store = Store(place.space.user)
    registry = store.registry()
    definitions = McpDefinitions(registry.database, registry.actor.name)
    space = str(place.space.user)
    named: dict[str, str] = {}
    listed = {ServerKey(space, server): group for server, group in _servers(tools)}
    for known in definitions.servers():
        if known.key not in listed:
            definitions.remove(known.key)
    for key, group in listed.items():
        _, kept = definitions.change(key, _Listing(key, group))
        offered = {one.name: one.tool_id for one in kept if one.state != "gone"}
        named |= {f"mcp/{key.server}/{offered[tool.name]}": tool.id for tool in group}
    store.close()
    return named


def holds(place: Place, count: int) -> bool:
    """Whether the store knows so many tools."""
    store = Store(place.space.user)
    try:
        registry = store.registry()
        return sum(McpDefinitions(registry.database, registry.actor.name).sizes().values()) == count
    except KiwiError:
        return False
    finally:
        store.close()


class Desk:
    """Asks a kernel, and gives the tools of its answers as whoever listed them calls them."""

    def __init__(self, kernel: Kernel, named: Mapping[str, str], runner: asyncio.Runner, space: Space) -> None:
        self._kernel, self._named, self._runner, self._space = kernel, named, runner, space
        self._items = {name: item for item, name in named.items()}
        self._uses = 0
        """How many were told since the kernel was last seen to know them all."""

    def use(self, tool: str, request: str) -> None:
        """Let the kernel remember that a tool was used after a request."""
        self._recall_log.add(self._items[tool], request, self._space, _OWNER, is_run=True)
        self._uses += 1
        if self._uses >= _AT_ONCE:
            self._learn()

    def forget(self) -> None:
        """Let the kernel forget what was used."""
        self._learn()
        answer = self._runner.run(self._kernel.call("memory", {"action": "forget"}, _OWNER))
        if answer.is_error:
            raise RuntimeError(answer.content)

    @property
    def _recall_log(self) -> RecallLog:
        # No server is there to be called, so that a use is told to what a call would tell it to.
        return self._kernel._services.recall_log  # noqa: SLF001 - nothing else may say that something was used

    def _learn(self) -> None:
        """Wait until all that was used counts."""
        if self._uses:
            self._uses = 0
            self.answer("begin", 1)  # what nobody asks for is not read
            if not self._recall_log.wait_until_stored(_PATIENCE):
                raise TimeoutError("What was used is not remembered.")

    def ask(self, need: str, limit: int) -> list[str]:
        """Return what is found for a need, best first."""
        self._learn()
        found = map(as_object, as_list(self.answer(need, limit).get("results")))
        return [self._named[as_text(one.get("identity")).partition("@")[0]] for one in found]

    def answer(self, need: str, limit: int) -> JsonObject:
        """Return what the verb `search` answers."""
        request: JsonObject = {"query": need, "limit": limit, "source": "mcp"}
        # Not `Runner.run`: it takes over the interrupt each time, which no surface does for a call.
        answer = self._runner.get_loop().run_until_complete(self._kernel.call("search", request, _OWNER))
        if answer.is_error:
            raise RuntimeError(answer.content)
        return answer.content

    def greet(self) -> None:
        """Ask what clients ask first."""
        self._runner.run(self._kernel.offers())

    def settle(self) -> None:
        """Wait until everything can be found."""
        until = time.monotonic() + _PATIENCE
        while "indexing" in self.answer("begin", 1):
            if time.monotonic() > until:
                raise TimeoutError("The index is not complete.")
            time.sleep(_GLANCE)


@contextmanager
def opened(place: Place, named: Mapping[str, str]) -> Iterator[Desk]:
    """Give a desk before a kernel that ends with the block."""
    with asyncio.Runner() as runner:
        kernel = place.kernel()
        try:
            yield Desk(kernel, named, runner, place.space)
        finally:
            runner.run(kernel.aclose())


@dataclass(frozen=True, slots=True)
class _Listing:
    """Makes of what was known of a server what is known once it has listed its tools and the owner accepted them."""

    key: ServerKey
    tools: Sequence[Listed]

    def __call__(self, known: ServerRecord | None, before: Sequence[Definition]) -> ServerDefinitions:
        server, source = self.key.server, self.tools[0].source
        info: JsonObject = {"name": source, "version": "1.0.0"}
        listing = ServerListing(info, "2025-06-18", "legacy", tools=tuple(map(_definition, self.tools)))
        issues: list[Issue] = []
        offers = offers_of(server, listing, issues)
        if issues:
            raise RuntimeError(issues)
        record = known or ServerRecord(
            self.key, f"user/user/{server}@1.0.0", path="", digest="", info=info, seen_at=_SEEN
        )
        return record, merged(before, offers, is_accepted=True, now=_SEEN)


def _servers(tools: Iterable[Listed]) -> Iterator[tuple[str, Sequence[Listed]]]:
    """Give each server with its tools; a name that a server has already is another server's of the same source."""
    shelves: dict[str, list[dict[str, Listed]]] = {}
    for tool in tools:
        of_source = shelves.setdefault(tool.source, [])
        room = next((shelf for shelf in of_source if tool.name not in shelf), None)
        if room is None:
            of_source.append(room := {})
        room[tool.name] = tool
    taken: set[str] = set()
    for source, of_source in shelves.items():
        for shelf in of_source:
            taken.add(server := id_for(source, taken))
            yield server, [*shelf.values()]


def _definition(tool: Listed) -> JsonObject:
    properties = {
        name: {"type": "string", **({"description": text} if text else {})} for name, text in tool.parameters.items()
    }
    schema: JsonObject = {"type": "object", "properties": properties}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}
