"""Messages before the outcome contain no secret value."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.calls import NO_CALLER, Answers, Caller, Question, Questions, no_answers, unheard
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome, Progress, silent
from kiwi_mcp.primitives.secrets.redaction import redacted, without_secrets

SECRETS = {"API_KEY": "s3cr3t-value"}


@pytest.mark.case("SEC-05")
async def test_progress_questions_and_log_lines_contain_no_secret() -> None:
    heard: list[str] = []
    lines: list[JsonObject] = []

    async def answer(questions: Questions) -> Answers:
        assert questions["q"].params == {"message": "Is [redacted:API_KEY] yours?"}
        return {"q": {"action": "accept"}}

    caller = without_secrets(Caller(lambda step: heard.append(step.message), answer, lines.append), SECRETS)
    caller.report(Progress("sent s3cr3t-value"))
    caller.note({"level": "info", "data": {"key": ["s3cr3t-value"]}})
    asked = {"q": Question("elicitation/create", {"message": "Is s3cr3t-value yours?"})}

    assert await caller.ask(asked) == {"q": {"action": "accept"}}
    assert heard == ["sent [redacted:API_KEY]"]
    assert lines == [{"level": "info", "data": {"key": ["[redacted:API_KEY]"]}}]


def test_a_silent_caller_is_redacted_too() -> None:
    assert without_secrets(NO_CALLER, SECRETS) is NO_CALLER
    named = without_secrets(Caller(name="agent"), SECRETS)
    assert (named.report, named.ask, named.note, named.name) == (silent, no_answers, unheard, "agent")


def test_text_that_a_server_returns_verbatim_is_redacted_too() -> None:
    said = Outcome("success", passed={"content": [{"type": "text", "text": "s3cr3t-value"}]})
    assert redacted(said, SECRETS).passed == {"content": [{"type": "text", "text": "[redacted:API_KEY]"}]}
