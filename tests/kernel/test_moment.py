"""One call checks the store once, and the next call checks again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.runs import RunFilter, Runs


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "user").mkdir()
    return tmp_path / "user"


@pytest.fixture
def store(user: Path) -> Iterator[Store]:
    store = Store(user)
    yield store
    store.close()


def name_store(user: Path, path: Path) -> str:
    url = f"sqlite://{path}"
    (user / "registry.yaml").write_text(f"url: {url}\n")
    return url


def test_another_store_is_used_after_the_cache_interval(store: Store, user: Path, tmp_path: Path) -> None:
    before = store.registry()
    store.registry()  # checked once more, so that it counts as checked for a moment
    url = name_store(user, tmp_path / "other.db")
    store.look_again()
    now = store.registry()
    assert now is not before
    assert (now.database.url, store.registry_if_any()) == (url, now)


def test_runs_are_read_from_the_store_within_the_cache_interval(store: Store, user: Path, tmp_path: Path) -> None:
    before = store.runs()
    store.registry()  # checked once more, so that it counts as checked for a moment
    name_store(user, tmp_path / "other.db")
    assert store.runs() is not before


def test_a_missing_store_file_is_not_created_by_a_check(store: Store, user: Path) -> None:
    assert store.registry_if_any() is None
    assert not (user / "state").exists()


async def test_a_call_uses_the_store_that_was_configured_just_before(user: Path, tmp_path: Path) -> None:
    knowledge = tmp_path / "project" / ".ai" / "knowledge"
    knowledge.mkdir(parents=True)
    (knowledge / "note.md").write_text("---\nid: note\ntitle: Note\nversion: 1.0.0\n---\nhello\n")

    async def calls() -> list[str]:
        kernel = Kernel(tmp_path / "project", user=user, cache=tmp_path / "cache")
        urls = []
        for number in range(3):
            urls.append(name_store(user, tmp_path / f"{number}.db"))
            assert not (await kernel.call("execute", {"item_id": "note"})).is_error
        await kernel.aclose()
        return urls

    for url in await calls():
        database = open_database(url)
        assert [run.tool_id for run in Runs(database).list(RunFilter())] == ["note"]
        database.close()
