"""Callers: whoever waits for a call hears of its progress, and may be asked what the call cannot know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.identity import OWNER, Identity
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Report, silent

QuestionMethod = Literal["elicitation/create", "sampling/createMessage", "roots/list"]
"""What may be asked: the owner for words or a decision, their model for a text, their client for its folders."""


@dataclass(frozen=True, slots=True)
class Question:
    """One thing that a call has to know before it can go on, in MCP's words, so that it passes through unchanged."""

    method: QuestionMethod
    params: JsonObject
    is_own: bool = False
    """Whether Kiwi itself asks, so that nobody can have answered before they were asked."""


Questions: TypeAlias = Mapping[str, Question]
"""Questions that are asked at once, each under a key of the asker's own."""
Answers: TypeAlias = Mapping[str, JsonObject]
"""An answer to each question, under the same keys, in MCP's words: `{"action": "accept", "content": {…}}`."""
Ask: TypeAlias = Callable[[Questions], Awaitable[Answers]]
"""Asks, and waits for every answer; what cannot be asked there is refused as Unanswered."""
Note: TypeAlias = Callable[[JsonObject], None]
"""Takes one line that a tool logs, as MCP has it: `level`, `data`, perhaps `logger`. It must not block."""


async def nobody(questions: Questions) -> Answers:
    """Refuse to answer: nobody is there to be asked."""
    raise Unanswered(sorted({question.method for question in questions.values()}))


def unheard(_: JsonObject) -> None:
    """Take a line of a log, and tell it to nobody."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever waits for a call."""

    report: Report = silent
    ask: Ask = nobody
    note: Note = unheard
    capabilities: JsonObject = field(default_factory=dict)
    """What it can be asked, as MCP's clients declare it: `elicitation`, `sampling`, `roots`."""
    is_owner: bool = False
    """Whether what it answers are the owner's own words, so that it may approve what waits for the owner."""
    name: str = ""
    """Who it is, where it is somebody else than the owner of the store: whose runs these are then."""
    identity: Identity = OWNER
    """Who it is for the rules."""
    client: str = ""
    """The program that it calls through, as that names itself; nothing is decided by it."""


NOBODY = Caller()
"""A caller who hears nothing and answers nothing."""
