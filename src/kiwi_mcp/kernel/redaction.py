"""The one place where what leaves the metal is cleaned: nothing that is kept, told or asked holds a secret's value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kiwi_mcp.domain.caller import NOBODY, Answers, Caller, Questions, nobody, unheard
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.domain.outcome import Outcome, Progress, silent
from kiwi_mcp.primitives.secrets import Redactor


def redacted(outcome: Outcome, secrets: Mapping[str, str]) -> Outcome:
    """Return the outcome without the value of any secret in it."""
    if not secrets:
        return outcome
    cleaner, logs = Redactor(secrets), outcome.logs
    return replace(
        outcome,
        result=_without(cleaner, outcome.result),
        message=cleaner.text(outcome.message),
        logs=replace(logs, stdout=cleaner.text(logs.stdout), stderr=cleaner.text(logs.stderr)),
        details={name: _without(cleaner, value) for name, value in outcome.details.items()},
        passed=None if outcome.passed is None else as_object(_without(cleaner, outcome.passed)),
    )


def cleaned(text: str, secrets: Mapping[str, str]) -> str:
    """Return a text without the value of any secret in it."""
    return Redactor(secrets).text(text) if secrets else text


def careful(caller: Caller, secrets: Mapping[str, str]) -> Caller:
    """Return a caller who is told no secret's value before the outcome either."""
    if not secrets or caller == NOBODY:
        return caller
    cleaner = Redactor(secrets)

    def report(progress: Progress) -> None:
        caller.report(replace(progress, message=cleaner.text(progress.message)))

    async def ask(questions: Questions) -> Answers:
        return await caller.ask(
            {key: replace(one, params=as_object(_without(cleaner, one.params))) for key, one in questions.items()}
        )

    def note(line: JsonObject) -> None:
        caller.note(as_object(_without(cleaner, line)))

    # That nobody hears or answers must still be seen: a server is then not asked to tell, nor let ask.
    return replace(
        caller,
        report=silent if caller.report is silent else report,
        ask=nobody if caller.ask is nobody else ask,
        note=unheard if caller.note is unheard else note,
    )


def _without(cleaner: Redactor, value: Json) -> Json:
    match value:
        case str():
            return cleaner.text(value)
        case Mapping():
            return {cleaner.text(name): _without(cleaner, inner) for name, inner in value.items()}
        case list() | tuple():
            return [_without(cleaner, inner) for inner in value]
        case _:
            return value
