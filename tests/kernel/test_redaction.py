"""What is told before the outcome holds no secret's value either."""

from __future__ import annotations

import asyncio

import pytest

from kiwi_mcp.domain.caller import NOBODY, Answers, Caller, Question, Questions, nobody, unheard
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome, Progress, silent
from kiwi_mcp.kernel.redaction import careful, redacted

SECRETS = {"API_KEY": "s3cr3t-value"}


@pytest.mark.case("SEC-05")
def test_no_secret_is_told_in_progress_a_question_or_a_line_of_a_log() -> None:
    heard: list[str] = []
    lines: list[JsonObject] = []

    async def answer(questions: Questions) -> Answers:
        assert questions["q"].params == {"message": "Is [redacted:API_KEY] yours?"}
        return {"q": {"action": "accept"}}

    caller = careful(Caller(lambda step: heard.append(step.message), answer, lines.append), SECRETS)
    caller.report(Progress("sent s3cr3t-value"))
    caller.note({"level": "info", "data": {"key": ["s3cr3t-value"]}})
    asked = {"q": Question("elicitation/create", {"message": "Is s3cr3t-value yours?"})}

    assert asyncio.run(caller.ask(asked)) == {"q": {"action": "accept"}}  # type: ignore[arg-type]  # a coroutine
    assert heard == ["sent [redacted:API_KEY]"]
    assert lines == [{"level": "info", "data": {"key": ["[redacted:API_KEY]"]}}]


def test_whoever_hears_and_answers_nothing_is_still_seen_to() -> None:
    assert careful(NOBODY, SECRETS) is NOBODY
    named = careful(Caller(name="agent"), SECRETS)
    assert (named.report, named.ask, named.note, named.name) == (silent, nobody, unheard, "agent")


def test_what_a_server_said_word_for_word_is_cleaned_too() -> None:
    said = Outcome("success", passed={"content": [{"type": "text", "text": "s3cr3t-value"}]})
    assert redacted(said, SECRETS).passed == {"content": [{"type": "text", "text": "[redacted:API_KEY]"}]}
