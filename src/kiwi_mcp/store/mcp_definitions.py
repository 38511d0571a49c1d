"""Servers and their tool definitions, as listed and as accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import TypeAlias, cast

from msgspec import Struct, convert
from msgspec.structs import replace

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.mcp import Definition, OfferKind, ServerKey, ServerRecord, State
from kiwi_mcp.store.database import Database, Row, Value, insert_into, json_column, read_json_column

ServerDefinitions: TypeAlias = "tuple[ServerRecord, Sequence[Definition]]"

_SERVER = ServerRecord.__struct_fields__[1:]
_DEFINITION = (
    "kind", "name", "tool_id", "state", "definition", "digest", "accepted", "accepted_digest", "seen_at", "accepted_at",
)  # fmt: skip
_KEY = ("actor", "space", "server")
_IS = "actor = ? and space = ? and server = ?"
_SERVERS = f"select space, server, {', '.join(_SERVER)} from mcp_servers"  # noqa: S608 - our own names
_DEFINITIONS = f"select space, server, {', '.join(_DEFINITION)} from mcp_definitions"  # noqa: S608 - as above
_PUT_SERVER = f"""{insert_into("mcp_servers", _KEY + _SERVER)}
  on conflict (actor, space, server) do update set {", ".join(f"{name} = excluded.{name}" for name in _SERVER)}"""
_ORDER = "order by space, server, kind, name"
# Asked for a name alone, SQLite goes through all that the actor has, by the primary key, and not by the index of names.
_IS_NAMED = (
    "(actor, space, server, kind, name) in"
    " (select actor, space, server, kind, name from mcp_definitions where actor = ? and tool_id = ?)"
)


class DefinitionSummary(Struct, frozen=True):
    """The fields that identify one definition of a server, without its content."""

    kind: str
    name: str
    tool_id: str
    state: str
    digest: str
    accepted_digest: str
    seen_at: str


class McpDefinitions:
    """The servers of one actor. Every change is atomic: no other process sees a server without its definitions."""

    def __init__(self, database: Database, actor: str) -> None:
        self.database = database
        self._actor = actor
        self._seen: tuple[int, Mapping[ServerKey, tuple[str, str]]] | None = None

    def marks(self) -> Mapping[ServerKey, tuple[str, str]]:
        """Return the mark of every server and the path of its manifest: the same ones as long as nothing changed."""
        stamp = self.database.stamp()
        if self._seen is None or self._seen[0] != stamp:
            rows = self.database.read(
                "select space, server, mark, path from mcp_servers where actor = ?", (self._actor,)
            )
            self._seen = (stamp, {ServerKey(str(r[0]), str(r[1])): (str(r[2]), str(r[3])) for r in rows})
        return self._seen[1]

    def servers(self) -> Sequence[ServerRecord]:
        """Return every server."""
        rows = self.database.read(f"{_SERVERS} where actor = ? order by space, server", (self._actor,))
        return tuple(map(_server, rows))

    def find(self, key: ServerKey) -> ServerRecord | None:
        """Return one server, if it is known."""
        return next(map(_server, self.database.read(f"{_SERVERS} where {_IS}", (self._actor, *key))), None)

    def of(self, key: ServerKey) -> Sequence[Definition]:
        """Return the definitions that a server offers now or offered earlier."""
        return tuple(make() for _, make in self.sketches(key))

    def sketches(self, key: ServerKey) -> Iterator[tuple[DefinitionSummary, Callable[[], Definition]]]:
        """Yield a summary of each definition of a server, and a function that parses it, which takes far longer."""
        for row in self.database.read(f"{_DEFINITIONS} where {_IS} {_ORDER}", (self._actor, *key)):
            _, _, kind, name, tool_id, state, _, digest, _, accepted_digest, seen_at, _ = map(str, row)
            sketch = DefinitionSummary(kind, name, tool_id, state, digest, accepted_digest, seen_at)
            yield sketch, partial(_definition, row)

    def states(self, key: ServerKey) -> Mapping[State, int]:
        """Return how many definitions of a server are in each state."""
        statement = f"select state, count(*) from mcp_definitions where {_IS} group by state"  # noqa: S608 - as above
        rows = self.database.read(statement, (self._actor, *key))
        return {cast("State", state): int(str(count)) for state, count in rows}

    def sizes(self) -> Mapping[ServerKey, int]:
        """Return how many things each server offers or once did."""
        statement = "select space, server, count(*) from mcp_definitions where actor = ? group by space, server"
        rows = self.database.read(statement, (self._actor,))
        return {ServerKey(str(space), str(server)): int(str(count)) for space, server, count in rows}

    def first(self, key: ServerKey, count: int) -> Sequence[Definition]:
        """Return the first things that a server offers or once did, in the order of their names."""
        rows = self.database.read(f"{_DEFINITIONS} where {_IS} {_ORDER} limit ?", (self._actor, *key, count))
        return tuple(map(_definition, rows))

    def named(self, tool_id: str) -> Sequence[tuple[ServerKey, Definition]]:
        """Return the definitions that servers offer under one item name."""
        rows = self.database.read(f"{_DEFINITIONS} where {_IS_NAMED} {_ORDER}", (self._actor, tool_id))
        return tuple((ServerKey(str(row[0]), str(row[1])), _definition(row)) for row in rows)

    def change(
        self, key: ServerKey, work: Callable[[ServerRecord | None, Sequence[Definition]], ServerDefinitions]
    ) -> ServerDefinitions:
        """Replace the stored definitions of a server by the result of `work`, in one exclusive transaction."""
        with self.database.transaction() as transaction:
            rows = transaction.read(f"{_SERVERS} where {_IS}", (self._actor, *key))
            known = transaction.read(f"{_DEFINITIONS} where {_IS} {_ORDER}", (self._actor, *key))
            before = tuple(map(_definition, known))
            server, after = work(_server(rows[0]) if rows else None, before)
            server = replace(server, mark=token_hex(8))
            cells = {name: getattr(server, name) for name in _SERVER}
            cells |= {"info": json_column(server.info), "words": json_column(server.words)}
            cells["accepts_first"] = int(server.accepts_first)
            transaction.write(_PUT_SERVER, (self._actor, *server.key, *cells.values()))
            if after != before:
                transaction.write(f"delete from mcp_definitions where {_IS}", (self._actor, *key))  # noqa: S608 - as above
                transaction.insert("mcp_definitions", (*_KEY, *_DEFINITION), self._rows(key, after))
        return server, after

    def remove(self, key: ServerKey) -> bool:
        """Forget a server and all that it offers, and say whether it was known."""
        with self.database.transaction() as transaction:
            return transaction.write(f"delete from mcp_servers where {_IS}", (self._actor, *key)) > 0  # noqa: S608 - as above

    def _rows(self, key: ServerKey, definitions: Iterable[Definition]) -> Iterable[Sequence[Value]]:
        for one in definitions:
            accepted = None if one.accepted is None else json_column(one.accepted)
            yield (
                self._actor, *key, one.kind, one.name, one.tool_id, one.state, json_column(one.offered), one.digest,
                accepted, one.accepted_digest, one.seen_at, one.accepted_at,
            )  # fmt: skip


def _object(text: Value) -> JsonObject:
    fix = "Take the store back from a backup, or `kiwi mcp remove` the server and add it anew."
    return read_json_column(text, "A definition of an MCP server", fix)


def _server(row: Row) -> ServerRecord:
    cells: dict[str, Json] = dict(zip(_SERVER, row[2:], strict=True))
    cells |= {name: _object(str(cells[name])) for name in ("info", "words")}
    return convert({"key": row[:2], **cells, "accepts_first": bool(cells["accepts_first"])}, ServerRecord)


def _definition(row: Row) -> Definition:
    _, _, kind, name, tool_id, state, offered, digest, accepted, accepted_digest, seen_at, accepted_at = row
    says = _object(offered)
    said = None if accepted is None else says if accepted == offered else _object(accepted)
    return Definition(
        cast("OfferKind", kind), str(name), str(tool_id), cast("State", state), says, str(digest),
        said, str(accepted_digest), str(seen_at), str(accepted_at),
    )  # fmt: skip
