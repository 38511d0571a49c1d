"""A store that moves between databases, and databases that cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from tests.plugins.postgres import PostgresServer

from kiwi_mcp.domain.errors import StoreUnavailable
from kiwi_mcp.domain.json import as_list, as_object, as_text
from kiwi_mcp.kernel import Answer
from kiwi_mcp.store.move import REBUILT, TABLES
from kiwi_mcp.store.open import open_database

Ask = Callable[..., Answer]


@pytest.mark.usefixtures("sandbox")
def test_a_store_moves_to_postgres_and_back_and_forgets_nothing(
    ask: Ask, home: Path, tmp_path: Path, new_postgres: Callable[[], str]
) -> None:
    words = {"tool_type": "script", "executor": "bash_runtime", "version": "1.0.0", "description": "Say é and 🥝"}
    files = {"files": {"main.sh": "echo hello\n"}, "tags": ["a b", 'q"c']}
    assert not ask("execute", action="create", item_id="greet", parameters={**words, **files}).is_error
    assert not ask("execute", action="publish", item_id="greet").is_error
    ran = ask("execute", item_id="greet").content
    ask("approvals", action="add_rule", item="project/local/greet")

    def seen() -> list[object]:
        runs = [as_object(one)["id"] for one in as_list(ask("runs", action="list").content["runs"])]
        rules = len(as_list(ask("approvals", action="rules").content["rules"]))
        verified = ask("audit", action="verify").content["status"]
        found = ask("search", query="greet", source="registry").content["results"]
        return [runs, rules, verified, [as_object(one)["identity"] for one in as_list(found)]]

    before, url, settings = seen(), new_postgres(), home / ".ai" / "registry.yaml"
    assert before[0] == [ran["run_id"]]

    settings.write_text(f"# ours\nurl: {url}\n")
    forgotten = ask("runs", action="list").content
    assert (forgotten["code"], f"`kiwi registry move {url}`" in as_text(forgotten["suggestion"])) == (
        "store_unavailable", True
    )  # fmt: skip
    moved = ask("registry", action="move", url=url).content
    assert moved.get("status") == "moved", moved
    assert seen() == before

    back = f"sqlite://{tmp_path}/back.db"
    assert ask("registry", action="move", url=back).content["status"] == "moved"
    assert seen() == before
    assert settings.read_text() == f"# ours\nurl: {back}\n"

    again = ask("registry", action="move", url=url).content
    assert (again["code"], "has data already" in as_text(again["message"])) == ("conflict", True)
    assert ask("registry", action="move", url="postgresql://a:b@h/d").content["code"] == "invalid_request"
    with psycopg.connect(url) as connection:
        tables = {name for (name,) in connection.execute("select tablename from pg_tables where schemaname = 'public'")}
    assert tables <= {*TABLES, *REBUILT}


def test_a_database_with_another_encoding_is_refused_before_anything_is_made(postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("create database ascii encoding 'SQL_ASCII' template template0 locale 'C'")
    url = f"{postgres_server.url.rpartition('/')[0]}/ascii"

    with pytest.raises(StoreUnavailable, match="its encoding is SQL_ASCII, not UTF8") as refused:
        open_database(url)

    assert "`createdb -E UTF8 -T template0 ascii_utf8`" in refused.value.suggestion
    with psycopg.connect(url) as connection:
        assert connection.execute("select count(*) from pg_tables where schemaname = 'public'").fetchall() == [(0,)]
    postgres_server.drop("ascii")
