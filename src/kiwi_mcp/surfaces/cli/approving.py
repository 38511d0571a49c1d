"""The owner's word on a terminal: a question as it stands, and yes, always, or no."""

from __future__ import annotations

import asyncio
import sys
import termios
from contextlib import suppress

from kiwi_mcp.domain.caller import Answers, Ask, Question, Questions, nobody
from kiwi_mcp.domain.errors import PolicyDenied, Unanswered
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.surfaces.cli.screen import talk
from kiwi_mcp.surfaces.cli.terminal import shown

_PROMPT = "[y]es, once / [a]lways for this tool / [N]o: "
_SHORT_PROMPT = "[y]es / [N]o: "
_YES: JsonObject = {"action": "accept", "content": {"approve": True, "always": "none"}}
_ALWAYS: JsonObject = {"action": "accept", "content": {"approve": True, "always": "this tool"}}
_NO: JsonObject = {"action": "decline"}
_WORDS = {"y": _YES, "yes": _YES, "a": _ALWAYS, "always": _ALWAYS}


def owners_word(*, is_yes: bool) -> Ask:
    """Return how Kiwi's own questions are answered: by `--yes`, on the terminal, or not at all where there is none."""
    if is_yes:
        return _agreed
    return _on_terminal if sys.stdin.isatty() and sys.stderr.isatty() else nobody


def is_meant(message: str, *, is_yes: bool) -> bool:
    """Whether a person means what they typed: they are asked on a terminal, and elsewhere only `--yes` says so."""
    ask = owners_word(is_yes=is_yes)
    if ask is nobody:
        told = f"This is asked first, and there is no terminal to ask on: {message}"
        raise PolicyDenied(told, suggestion="Add `--yes` if that is meant.")
    return asyncio.run(_is_confirmed(message, ask))


async def _is_confirmed(message: str, ask: Ask) -> bool:
    question = Question("elicitation/create", {"message": message}, is_own=True)
    return (await ask({"meant": question}))["meant"] == _YES


async def _agreed(questions: Questions) -> Answers:
    _refuse_others(questions)
    return dict.fromkeys(questions, _YES)


async def _on_terminal(questions: Questions) -> Answers:
    _refuse_others(questions)
    return {key: await _asked(question) for key, question in questions.items()}


def _refuse_others(questions: Questions) -> None:
    """Refuse what a tool asks: on the command line, only Kiwi's own questions are put."""
    if not all(question.is_own for question in questions.values()):
        raise Unanswered(sorted({question.method for question in questions.values()}))


async def _asked(question: Question) -> JsonObject:
    talk(f"\n{as_text(question.params.get('message'))}\n")
    asked = as_object(as_object(question.params.get("requestedSchema")).get("properties"))
    _forget_typed()
    sys.stderr.write(shown(_PROMPT if "always" in asked else _SHORT_PROMPT))
    sys.stderr.flush()
    return _WORDS.get((await _typed()).strip().lower(), _NO)


def _forget_typed() -> None:
    """Drop what was typed before the question stood there: it was no answer to it."""
    with suppress(termios.error, ValueError):  # no terminal, or one that is gone
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


async def _typed() -> str:
    """Return a line that is typed; waiting for it can be given up, as no thread does."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        if not line.done():
            line.set_result(sys.stdin.readline())

    loop.add_reader(sys.stdin, read)
    try:
        return await line
    finally:
        loop.remove_reader(sys.stdin)
