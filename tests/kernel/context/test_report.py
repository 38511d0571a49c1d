"""The context cost in doctor and prefer, from what was sent, answered and called."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.records import Receipt
from kiwi_mcp.domain.times import iso, run_id
from kiwi_mcp.domain.token_cost import cost_of, cost_of_json
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.verbs import INSTRUCTIONS

Ask = Callable[..., Answer]
Called = Callable[[str, float], None]
META = ["search", "load", "execute", "help"]


@pytest.fixture(autouse=True)
def tools(project: Path) -> None:
    (project / ".ai" / "tools").mkdir()
    for name in ("weather", "forecast", "tide", "moon"):
        head = f'"""Tell the {name} of a city"""\n__version__ = "1.0.0"\n__tool_type__ = "script"\n'
        code = '__executor_id__ = "python_runtime"\n\n\ndef main(city: str):\n    return city\n'
        (project / ".ai" / "tools" / f"{name}.py").write_text(head + code)


@pytest.fixture
def preferences(home: Path) -> Path:
    (home / ".ai").mkdir()
    return home / ".ai" / "preferences.yaml"


@pytest.fixture
def model(project: Path) -> Ask:
    """Ask what a model asks, through its client."""

    async def call(verb: str, request: JsonObject) -> Answer:
        kernel = Kernel(project, is_owner=False, surface="mcp")
        try:
            return await kernel.call(verb, request)
        finally:
            await kernel.aclose()

    return lambda verb, **request: asyncio.run(call(verb, request))


@pytest.fixture
def called(home: Path) -> Called:
    """Record a call of an item by a model, some days ago."""

    def write(name: str, days: float) -> None:
        moment = int((datetime.now(UTC) - timedelta(days=days)).timestamp() * 1_000)
        full_name = f"project/local/{name}@1.0.0"
        made = Receipt(
            run_id(moment, 0), iso(moment), "ana", "mcp", "run", name, "success", "standard", identity=full_name
        )
        store = Store(home / ".ai")
        try:
            store.receipts().add(made)
        finally:
            store.close()

    return write


def context(ask: Ask) -> JsonObject:
    return as_object(ask("doctor").content["context"])


def rows(answer: JsonObject, word: str) -> list[JsonObject]:
    return [as_object(row) for row in as_list(answer[word])]


def lines(ask: Ask) -> list[str]:
    checks = rows(ask("doctor").content, "checks")
    return [as_text(check["detail"]) for check in checks if check["check"] == "context"]


@pytest.mark.usefixtures("sandbox")
def test_doctor_reports_the_cost_of_each_part_that_every_conversation_receives(ask: Ask, preferences: Path) -> None:
    preferences.write_text("always_send: {weather: true, help: false}\n")
    response = context(ask)
    sent = rows(response, "sent")
    assert [row["name"] for row in sent] == ["instructions", *META[:3], "weather"]
    assert sent[0] == {"name": "instructions", **cost_of(INSTRUCTIONS).to_json()}
    assert sent[-1]["identity"] == "project/local/weather@1.0.0"
    for word in ("bytes", "tokens"):
        assert response[word] == sum(int(str(row[word])) for row in sent)
    (line,) = lines(ask)
    assert line.startswith(f"about {response['tokens']:,} tokens ({response['bytes']:,} bytes) in every conversation")
    assert f"{sent[-1]['tokens']} of them for your 1 tools (weather {sent[-1]['tokens']})" in line


@pytest.mark.usefixtures("sandbox")
def test_prefer_reports_the_same_figures(ask: Ask, preferences: Path) -> None:
    preferences.write_text("always_send: {weather: true}\n")
    response, sent = ask("prefer").content, {row["name"]: row["tokens"] for row in rows(context(ask), "sent")}
    assert response["meta_tool_tokens"] == {name: sent[name] for name in META}
    assert response["tokens"] == rows(response, "tools")[0]["tokens"] == sent["weather"]


@pytest.mark.usefixtures("sandbox")
def test_an_answer_is_counted_when_a_model_reads_it(ask: Ask, model: Ask) -> None:
    assert context(ask)["answers"] == {}
    found = model("search", query="weather of a city")
    loaded = model("load", item_id="weather")
    ask("search", query="moon")  # a person at a terminal, or a program
    assert model("load", item_id="absent").is_error
    response = as_object(context(ask)["answers"])
    assert response == {
        "search": {"answers": 1, **cost_of_json(found.content).to_json()},
        "load": {"answers": 1, **cost_of_json(loaded.content).to_json()},
    }
    assert "for the answer to a search, on average of 1" in lines(ask)[0]


@pytest.mark.usefixtures("sandbox")
def test_a_tool_that_most_conversations_call_is_proposed_until_it_is_added(
    ask: Ask, model: Ask, called: Called
) -> None:
    model("search", query="weather of a city", limit=10)
    model("load", item_id="weather")
    for day in (9.0, 8.0, 7.0, 6.0, 5.0):
        called("weather", day)
    called("tide", 4.0)
    (advice,) = rows(ask("prefer", action="suggest").content, "suggestions")
    assert (advice["action"], advice["name"]) == ("add", "weather")
    assert "called in 5 of 6 conversations" in as_text(advice["why"])
    assert int(str(advice["saves"])) > 0
    assert any(line.startswith("weather was called in 5 of 6") for line in lines(ask))
    command = as_text(advice["command"]).split()
    assert command[:2] == ["kiwi", "prefer"]
    assert ask("prefer", action=command[2], name=command[3]).content["came"] == ["weather"]
    assert rows(ask("prefer", action="suggest").content, "suggestions") == []


def test_a_tool_that_is_sent_and_never_called_is_proposed_for_removal(
    ask: Ask, called: Called, preferences: Path
) -> None:
    preferences.write_text("always_send: {weather: true, moon: true}\n")
    long_ago = datetime.now(UTC).timestamp() - 80 * 86_400
    os.utime(preferences, (long_ago, long_ago))
    for day in (40.0, 9.0, 8.0, 7.0, 6.0, 5.0):
        called("weather", day)
    (advice,) = rows(ask("prefer", action="suggest").content, "suggestions")
    assert advice["command"] == "kiwi prefer remove moon"
    assert ask("prefer", action="remove", name="moon").content["went"] == ["moon"]
    assert rows(ask("prefer", action="suggest").content, "suggestions") == []


def test_a_missing_or_denied_tool_is_not_proposed(ask: Ask, called: Called, preferences: Path) -> None:
    for day in (9.0, 8.0, 7.0, 6.0, 5.0):
        called("gone", day)
        called("weather", day)
    preferences.with_name("policy.yaml").write_text("items: {allow: ['*'], deny: ['project/local/weather@*']}\n")
    assert rows(ask("prefer", action="suggest").content, "suggestions") == []


@pytest.mark.usefixtures("sandbox")
def test_figures_about_the_owner_are_shown_only_to_the_owner(model: Ask, called: Called) -> None:
    for day in (9.0, 8.0, 7.0, 6.0, 5.0):
        called("weather", day)
    refused = model("prefer", action="suggest").content
    assert refused["code"] == "not_permitted"
    assert "kiwi prefer suggest" in as_text(refused["suggestion"])
    assert {*context(model)} == {"summary", "bytes", "tokens"}


def test_asking_for_advice_leaves_no_receipt(ask: Ask) -> None:
    ask("prefer", action="suggest")
    assert ask("audit").content["receipts"] == []
