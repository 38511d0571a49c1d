"""Definitions of MCP servers in the store: atomic changes, separate for each actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerRecord
from kiwi_mcp.store.database import Database, IntegrityFault
from kiwi_mcp.store.mcp_definitions import McpDefinitions, ServerDefinitions

KEY = ServerKey("home", "files")
SERVER = ServerRecord(KEY, "user/local/files@1.0.0", "files.yaml", "d" * 64, info={"name": "files"})


def offered(name: str, state: str = "new", **words: str) -> Definition:
    definition = Definition("tool", name, name.lower(), "new", {"name": name, "description": "\ud83d \0 ü"}, "a" * 64)
    if state == "new":
        return definition
    accepted = {"name": name}
    return replace(definition, state=state, accepted=accepted, accepted_digest=words.get("accepted", "a" * 64))


@pytest.fixture
def definitions(database: Database) -> McpDefinitions:
    return McpDefinitions(database, "ann")


def keep(*known: Definition, server: ServerRecord = SERVER) -> Callable[[object, object], ServerDefinitions]:
    return lambda _server, _known: (server, known)


def test_stored_definitions_are_returned_unchanged(definitions: McpDefinitions) -> None:
    first, second = offered("Read"), offered("Write", "changed", accepted="b" * 64)
    server, _ = definitions.change(KEY, keep(first, second))
    assert definitions.find(KEY) == server
    assert definitions.servers() == (server,)
    assert definitions.of(KEY) == (first, second)
    assert definitions.named("write") == ((KEY, second),)


def test_every_change_gives_another_etag(definitions: McpDefinitions) -> None:
    seen = set()
    for _ in range(3):
        definitions.change(KEY, keep(offered("Read")))
        seen.add(definitions.marks()[KEY])
    assert len(seen) == 3
    assert definitions.marks() is definitions.marks() or definitions.database.dialect == "postgres"


def test_an_actor_sees_their_own_servers(definitions: McpDefinitions, database: Database) -> None:
    definitions.change(KEY, keep(offered("Read")))
    other = McpDefinitions(database, "bob")
    assert not other.marks()
    assert not other.of(KEY)
    assert not other.named("read")
    assert not other.remove(KEY)
    assert definitions.of(KEY)


def test_a_server_is_removed_with_all_its_definitions(definitions: McpDefinitions) -> None:
    definitions.change(KEY, keep(offered("Read")))
    assert definitions.remove(KEY)
    assert definitions.find(KEY) is None
    assert not definitions.of(KEY)


def test_a_failed_change_changes_nothing(definitions: McpDefinitions) -> None:
    definitions.change(KEY, keep(offered("Read")))
    before = definitions.find(KEY), definitions.of(KEY)
    with pytest.raises(IntegrityFault):
        definitions.change(KEY, keep(offered("Read"), offered("Write", "accepted", accepted="b" * 64)))
    assert (definitions.find(KEY), definitions.of(KEY)) == before


def test_concurrent_changes_lose_nothing(definitions: McpDefinitions) -> None:
    definitions.change(KEY, keep())

    def add(number: int) -> None:
        def work(server: ServerRecord | None, known: Sequence[Definition]) -> ServerDefinitions:
            return server or SERVER, tuple(sorted((*known, offered(f"t{number}")), key=lambda one: one.name))

        definitions.change(KEY, work)

    threads = [Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert {one.name for one in definitions.of(KEY)} == {f"t{number}" for number in range(8)}
