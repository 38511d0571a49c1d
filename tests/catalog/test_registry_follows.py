"""The registry source follows the log: only changed items are listed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine
from tests.plugins.registries import set_visibility

from kiwi_mcp.catalog.registry_source import RegistrySource
from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.manifest.type_specs import load_type_specs
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    machine = a_machine("ann", namespaces=["acme"])
    for name in ("one", "two", "three"):
        machine.publish(name)
    return machine


@pytest.fixture
def database(ann: Machine) -> Iterator[Database]:
    opened = open_database(f"sqlite://{ann.user}/state/registry.db")
    yield opened
    opened.close()


class Followed:
    """A source as one actor sees it."""

    def __init__(self, database: Database, cache: Path, *namespaces: str) -> None:
        registry = Registry(database, Actor("ben", namespaces))
        self._source = RegistrySource(lambda: registry, cache)

    def now(self) -> dict[str, Card]:
        self._source.sync(load_type_specs())
        return {entry.tool_id: entry for entry in self._source.entries() if entry.namespace == "acme"}


@pytest.mark.usefixtures("sandbox")
def test_only_changed_entries_are_read_again(ann: Machine, database: Database, tmp_path: Path) -> None:
    followed = Followed(database, tmp_path / "cache", "acme")
    before = followed.now()
    ann.publish("two", "1.1.0")
    ann.publish("four")
    after = followed.now()

    assert {*after} == {"one", "two", "three", "four"}
    assert (before["two"].version, after["two"].version) == ("1.0.0", "1.1.0")
    assert after["one"] is before["one"]
    assert after["three"] is before["three"]


@pytest.mark.usefixtures("sandbox")
def test_hidden_and_yanked_versions_are_not_listed(ann: Machine, database: Database, tmp_path: Path) -> None:
    member, stranger = (Followed(database, tmp_path / "cache", name) for name in ("acme", "public"))
    assert {*member.now()} == {*stranger.now()} == {"one", "two", "three"}

    owner = Registry(database, Actor("ann", ("acme",)))
    set_visibility(owner, "acme", "one", "private")
    ann.do("yank", "registry/acme/two@1.0.0", {"reason": "wrong"})
    assert {*member.now()} == {"one", "three"}
    assert {*stranger.now()} == {"three"}

    set_visibility(owner, "acme", "one", "public")
    assert {*stranger.now()} == {"one", "three"}
