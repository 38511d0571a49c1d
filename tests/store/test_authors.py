"""Authors are stored by digest, separately for each user, and visible to every process at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kiwi_mcp.store.authors import Authors, Relaxation
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import connect_to

DIGEST, OTHER, CHAIN = "a" * 64, "b" * 64, "c" * 64


def relaxation(level: str = "standard", reason: str = "docker") -> Relaxation:
    return Relaxation(CHAIN, "project/local/deploy@1.0.0", DIGEST, level, reason, "ana", "2026-01-01T00:00:00.000Z")  # type: ignore[arg-type]  # a word of the literal


@pytest.fixture
def store(database: Database) -> Database:
    return database


@pytest.fixture
def beside(store: Database, store_url: str) -> Iterator[Database]:
    """The same store, as another process has it open."""
    opened = connect_to(store_url)
    yield opened
    opened.close()


def test_the_first_author_stays_unless_replaced(store: Database) -> None:
    authors = Authors(store, "ana")
    authors.record([DIGEST], "owner_written", "cli", replaces=True)
    authors.record([DIGEST, OTHER], "model_written", "mcp", replaces=False)
    assert authors.look_up([DIGEST, OTHER], CHAIN) == ({DIGEST: "owner_written", OTHER: "model_written"}, None)
    authors.record([OTHER], "owner_written", "cli", replaces=True)
    assert authors.look_up([OTHER], CHAIN)[0] == {OTHER: "owner_written"}


def test_authors_and_relaxations_of_one_user_do_not_apply_to_another(store: Database) -> None:
    Authors(store, "ana").record([DIGEST], "owner_written", "cli", replaces=True)
    Authors(store, "ana").relax(relaxation())
    assert Authors(store, "ben").look_up([DIGEST], CHAIN) == ({}, None)
    assert Authors(store, "ben").relaxations() == ()


def test_another_process_sees_a_change_at_once(store: Database, beside: Database) -> None:
    mine, theirs = Authors(store, "ana"), Authors(beside, "ana")
    before = mine.stamp()
    theirs.record([DIGEST], "model_written", "mcp", replaces=False)
    assert mine.stamp() != before
    assert mine.look_up([DIGEST], CHAIN)[0] == {DIGEST: "model_written"}


def test_a_relaxation_can_be_replaced_and_removed(store: Database) -> None:
    authors = Authors(store, "ana")
    authors.relax(relaxation())
    authors.relax(relaxation("trusted", "because"))
    assert authors.look_up([DIGEST], CHAIN)[1] == "trusted"
    assert [one.reason for one in authors.relaxations()] == ["because"]
    authors.tighten([CHAIN])
    assert authors.look_up([DIGEST], CHAIN)[1] is None
