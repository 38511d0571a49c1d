"""The discovery benchmark: a line protocol through which any scorer can use the search of Kiwi."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import pytest

from kiwi_mcp.store.sqlite import library

pytestmark = pytest.mark.usefixtures("processes")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOOLS = (
    {"id": "one", "source": "Mail Room", "name": "sendMessage", "description": "Send a letter by post."},
    {"id": "two", "source": "Mail Room", "name": "weigh_parcel", "description": "Weigh a parcel.", "parameters": {}},
    {
        "id": "three",
        "source": "@garden/tools",
        "name": "water plants/{bed}",
        "description": "Open the valve of a bed.",
        "parameters": {"bed": "Which tomatoes", "litres": ""},
    },
    {"id": "four", "source": "Mail Room", "name": "sendMessage", "description": "Send a telegram."},
)


@contextmanager
def adapter(tools: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(BENCHMARKS / "discovery_adapter.py"), *options, str(tools)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert pipe(process.stdout).readline() == "READY\n"
            yield process
            pipe(process.stdin).close()
            process.wait(120)
        finally:
            process.kill()


def pipe(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def ask(process: subprocess.Popen[str], query: str, k: int = 10) -> Sequence[str]:
    pipe(process.stdin).write(json.dumps({"id": "q", "query": query, "k": k}) + "\n")
    pipe(process.stdin).flush()
    found: Sequence[str] = json.loads(pipe(process.stdout).readline())
    return found


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.jsonl"
    path.write_text("".join(f"{json.dumps(tool)}\n" for tool in TOOLS), encoding="utf-8")
    return path


@pytest.mark.req("K-SE-03")
@pytest.mark.parametrize("options", [("--words",), ()])
def test_a_scorer_asks_the_search_verb_line_by_line(tools: Path, options: Sequence[str]) -> None:
    with adapter(tools, *options) as process:
        assert ask(process, "send a letter")[0] == "one"
        assert ask(process, "telegram", 1) == ["four"]
        assert ask(process, "tomatoes")[0] == "three"
        assert set(ask(process, "mail room")[:3]) == {"one", "two", "four"}
    assert process.returncode == 0


def test_computed_features_are_reused_by_the_next_run(tools: Path, tmp_path: Path) -> None:
    keep = tmp_path / "new" / "keep.db"
    for _ in range(2):
        with adapter(tools, "--keep", str(keep)) as process:
            assert ask(process, "telegram", 1) == ["four"]
        with closing(library.connect(str(keep))) as database:
            kept = database.execute("select digest, length(vector) > 0 from sheets order by digest").fetchall()
            assert [has_vector for _, has_vector in kept] == [1] * len(TOOLS)


def test_a_home_is_reused_by_the_next_run_and_rebuilt_if_damaged(tools: Path, tmp_path: Path) -> None:
    homes = tmp_path / "homes"

    def made() -> Path:
        with adapter(tools, "--words", "--homes", str(homes)) as process:
            assert ask(process, "telegram", 1) == ["four"]
        (home,) = homes.iterdir()
        return home / "user" / "state" / "registry.db"

    first = made()
    kept = first.stat().st_ino
    assert made().stat().st_ino == kept
    first.write_bytes(b"foreign" * 1_000)
    made()


def test_unreadable_stored_features_are_rebuilt(tools: Path, tmp_path: Path) -> None:
    keep = tmp_path / "keep.db"
    keep.write_bytes(b"foreign" * 1_000)
    with adapter(tools, "--keep", str(keep)) as process:
        assert ask(process, "telegram", 1) == ["four"]
    assert keep.read_bytes().startswith(b"SQLite format 3")


@pytest.mark.req("K-SE-03")
def test_the_quality_of_our_own_corpus_is_printed_as_a_table() -> None:
    asked = ["--quality", "--words", "--limit", "10", "--data", str(BENCHMARKS)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "discovery.py"), *asked],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| corpus")]
    assert [row[3] for row in rows] == ["Kiwi, words only", "FTS5 with fields", "FTS5"]
    assert all(0 < float(row[4]) <= 100 for row in rows)
