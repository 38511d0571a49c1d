"""Approvals through MCP: asked by forms in both eras, required without them, and never a tool call."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import CallToolResult, ElicitResult

import kiwi_mcp

pytestmark = pytest.mark.usefixtures("processes")

Mode = Literal["auto", "legacy"]
EACH_ERA = pytest.mark.parametrize("mode", ["auto", "legacy"])
PATIENCE = 120.0


def answer_in(result: CallToolResult) -> dict[str, Any]:
    assert result.structured_content is not None
    answer: dict[str, Any] = result.structured_content
    return answer


class Person:
    """The person at the client, with scripted answers to forms."""

    def __init__(self, answer: ElicitResult | None) -> None:
        self.asked: list[Any] = []
        self._answer = answer

    async def story(self, mode: Mode, project: Path, *calls: dict[str, Any]) -> list[dict[str, Any]]:
        async def elicited(_: object, params: Any) -> ElicitResult:
            self.asked.append(params)
            assert self._answer is not None
            return self._answer

        words = ["-m", "kiwi_mcp", "serve", "--project", str(project)]
        env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
        server = StdioServerParameters(command=sys.executable, args=words, env=env)
        asking = {"elicitation_callback": elicited} if self._answer is not None else {}
        async with (
            asyncio.timeout(PATIENCE),
            Client(stdio_client(server), mode=mode, **asking) as client,  # type: ignore[arg-type]  # one word of many
        ):
            return [answer_in(await client.call_tool(call.pop("tool", "execute"), call)) for call in calls]


def note(text: str) -> dict[str, Any]:
    return {"item_id": "post_note", "parameters": {"text": text}}


@EACH_ERA
@pytest.mark.req("K4")
async def test_a_person_at_the_client_is_asked_and_approves_once_or_always(
    mode: Mode, project: Path, sent: list[str]
) -> None:
    person = Person(ElicitResult(action="accept", content={"approve": True, "always": "this tool"}))
    first, second = await person.story(mode, project, note("one"), note("two"))
    assert (first["status"], second["status"]) == ("success", "success")
    assert "rule_id" in second["approval"]
    assert len(person.asked) == 1
    assert "  > text: one" in person.asked[0].message
    assert "(mcp, client mcp)\n" in f"{person.asked[0].message}\n"
    assert sent == ['{"text":"one"}', '{"text":"two"}']


@EACH_ERA
@pytest.mark.req("K4")
@pytest.mark.case("APPR-06")
async def test_a_person_who_declines_is_not_asked_again(mode: Mode, project: Path, sent: list[str]) -> None:
    person = Person(ElicitResult(action="decline"))
    response = await person.story(mode, project, note("one"), note("one"))
    assert [one["code"] for one in response] == ["denied", "denied"]
    assert (len(person.asked), sent) == (1, [])


@EACH_ERA
@pytest.mark.case("APPR-06")
async def test_closing_the_form_is_no_answer(mode: Mode, project: Path, sent: list[str]) -> None:
    person = Person(ElicitResult(action="cancel"))
    first, second = await person.story(mode, project, note("one"), note("one"))
    assert (first["code"], second["code"]) == ("approval_required", "approval_required")
    assert first["approval_id"] == second["approval_id"]
    assert (len(person.asked), sent) == (2, [])


@EACH_ERA
@pytest.mark.req("K2")
@pytest.mark.req("K4")
@pytest.mark.case("APPR-04")
@pytest.mark.case("PINJ-03")
async def test_a_client_without_forms_sees_what_waits_and_cannot_answer_by_a_call(
    mode: Mode, project: Path, sent: list[str]
) -> None:
    person = Person(None)
    (waiting,) = await person.story(mode, project, note("one"))
    assert waiting["code"] == "approval_required"
    assert f"kiwi approvals approve {waiting['number']}" in waiting["suggestion"]
    # What a page of knowledge, or a result, may talk a model into trying.
    tries: list[dict[str, Any]] = [
        {"tool": "approvals", "action": "approve", "approval_id": waiting["approval_id"]},
        {"tool": "approvals", "action": "add_rule", "item": "*"},
        {"item_id": "approvals", "parameters": {"action": "approve", "approval_id": waiting["approval_id"]}},
        note("one"),
    ]
    response = await person.story(mode, project, *tries)
    assert [one["code"] for one in response] == [
        "not_permitted",
        "not_permitted",
        "tool_not_found",
        "approval_required",
    ]
    assert response[-1]["approval_id"] == waiting["approval_id"]
    assert sent == []
