"""Searches return current items, in one run of a kernel and in the next, and encode nothing twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Protocol

import pytest

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.search.encoder import encoder_name, load_encoder
from kiwi_mcp.store.open import open_database

SCRIPT = Path(__file__).parents[1] / "data" / "mcp" / "scripted.py"


class Counting(Protocol):
    """An encoder that notes each text."""

    texts: list[str]


class Session:
    """One run of a kernel, asked by its owner."""

    def __init__(self, kernel: Kernel, owner: Caller) -> None:
        self._kernel, self._owner = kernel, owner

    async def tell(self, verb: str, **words: Json) -> JsonObject:
        answer = await self._kernel.call(verb, words, self._owner)
        assert not answer.is_error, answer.content
        return answer.content

    async def search(self, query: str) -> JsonObject:
        for _ in range(200):  # each waits for a moment
            response = await self.tell("search", query=query, source="all")
            if "indexing" not in response:
                return response
        pytest.fail("the index is never complete")

    async def names(self, query: str) -> list[str]:
        return [as_text(as_object(one)["name"]) for one in as_list((await self.search(query))["results"])]


@pytest.fixture
def in_a_run(project: Path, owner: Caller) -> Callable[[Callable[[Session], Awaitable[None]]], None]:
    """Tell a story in one run of a kernel."""

    def run_session(story: Callable[[Session], Awaitable[None]]) -> None:
        async def run() -> None:
            kernel = Kernel(project)
            try:
                await story(Session(kernel, owner))
            finally:
                began = monotonic()
                await kernel.aclose()
                assert monotonic() - began < 30  # a second, on a machine that has nothing else to do

        asyncio.run(run())

    return run_session


Tell = Callable[[Callable[[Session], Awaitable[None]]], None]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("E2")
@pytest.mark.usefixtures("encoder")
def test_tools_of_a_server_are_found_as_they_appear_change_and_disappear(tmp_path: Path, in_a_run: Tell) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    offers = folder / "offers.json"

    def offer(**tools: str) -> None:
        listed = [
            {"name": name, "description": said, "inputSchema": {"type": "object"}} for name, said in tools.items()
        ]
        offers.write_text(json.dumps({"tools": listed}))

    async def story(session: Session) -> None:
        assert "send_bill" not in await session.names("invoice")
        offer(send_bill="Sends a bill")
        words: JsonObject = {"command": sys.executable, "args": [str(SCRIPT), str(offers), str(folder)]}
        await session.tell("mcp", action="add", server="one", **words)
        assert (await session.names("invoice"))[0] == "send_bill"
        offer(look_out="Tells the weather")
        await session.tell("mcp", action="refresh", server="one")
        assert (await session.names("forecast"))[0] == "look_out"
        assert "send_bill" not in await session.names("invoice send bill")
        await session.tell("mcp", action="remove", server="one")
        assert "look_out" not in await session.names("forecast look out")

    in_a_run(story)


@pytest.mark.usefixtures("encoder_model")
@pytest.mark.req("E1")
def test_another_run_encodes_nothing_and_lost_features_are_rebuilt(
    in_a_run: Tell, encoder: Counting, home: Path
) -> None:
    answers: list[JsonObject] = []

    async def story(session: Session) -> None:
        response = await session.search("run a shell script")
        answers.append({word: response[word] for word in ("results", "total")})

    asked = len(encoder.texts)
    in_a_run(story)
    first = len(encoder.texts)
    assert first - asked > 5  # all that is built in, and what was asked for
    in_a_run(story)
    again = len(encoder.texts) - first
    assert encoder.texts[first:] == ["run a shell script"] * again
    database = open_database(default_url(home / ".ai"))
    with database.transaction() as transaction:
        assert transaction.write("delete from sheets") > 5
    database.close()
    in_a_run(story)
    assert len(encoder.texts) - first - again >= first - asked - again
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.usefixtures("encoder")
def test_an_unusable_store_does_not_change_searches(
    in_a_run: Tell, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "none.db").mkdir()
    monkeypatch.setenv("KIWI_REGISTRY", f"sqlite://{home}/none.db")

    async def story(session: Session) -> None:
        found = await session.search("run a shell script")
        assert as_list(found["results"])
        assert any("none.db" in as_text(one) for one in as_list(found["warnings"]))

    in_a_run(story)


@pytest.mark.usefixtures("encoder")
def test_one_damaged_row_in_the_store_loses_nothing_and_is_repaired(in_a_run: Tell, home: Path) -> None:
    answers: list[JsonObject] = []

    async def story(session: Session) -> None:
        response = await session.search("run a shell script")
        answers.append({word: response[word] for word in ("results", "total")})

    def sheets(statement: str) -> list[object]:
        database = open_database(default_url(home / ".ai"))
        with database.transaction() as transaction:
            transaction.write(statement)
            found = transaction.read("select digest, words, vector from sheets order by digest")
        database.close()
        return [*found]

    in_a_run(story)
    before = sheets("delete from sheets where false")
    first = "digest = (select min(digest) from sheets)"
    assert sheets(f"update sheets set words = x'ff00616263' where {first}") != before
    in_a_run(story)
    assert sheets("delete from sheets where false") == before
    sheets(f"update sheets set vector = x'ff00' where {first}")
    in_a_run(story)
    assert sheets("delete from sheets where false") == before
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.usefixtures("encoder")
def test_a_search_reports_a_failing_encoder(in_a_run: Tell, encoder: Counting) -> None:
    async def story(session: Session) -> None:
        await session.search("run a shell script")

        def fail(_: object) -> None:
            raise RuntimeError("out of order")

        vars(encoder)["encode"] = fail
        response = await session.search("run a bash script")
        assert as_list(response["results"])
        assert any("out of order" in as_text(one) for one in as_list(response["warnings"]))

    in_a_run(story)


def _printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.usefixtures("processes")
def test_search_modules_are_loaded_with_the_first_search() -> None:
    code = (
        "import sys, asyncio\n"
        "from kiwi_mcp.kernel import Kernel\n"
        "async def run():\n"
        "    kernel = Kernel()\n"
        "    await kernel.offers()\n"
        "    await kernel.call('load', {'item_id': 'bash_runtime'})\n"
        "    print([name for name in ('numpy', 'onnxruntime') if name in sys.modules])\n"
        "    await kernel.aclose()\n"
        "asyncio.run(run())\n"
    )
    assert _printed(code) == "[]"


@pytest.mark.usefixtures("encoder_model")
def test_the_encoder_name_matches_that_of_stored_vectors() -> None:
    encoder = load_encoder()
    assert encoder is not None
    assert encoder.name == encoder_name()


@pytest.mark.usefixtures("sandbox")
def test_doctor_reports_the_search_mode_and_the_index_progress(
    in_a_run: Tell, encoder: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(session: Session) -> None:
        await session.search("run a shell script")
        response = (await session.tell("doctor"))["checks"]
        (line,) = [one for one in map(as_object, as_list(response)) if one["check"] == "search"]
        reports.append(as_text(line["detail"]))

    reports: list[str] = []
    in_a_run(story)
    monkeypatch.setenv("KIWI_SEARCH", "words")
    in_a_run(story)
    assert encoder.texts
    assert reports[0].startswith("words and meaning (")
    assert reports[0].endswith("by meaning")
    assert reports[1].startswith("words only, as the owner chose; of ")
