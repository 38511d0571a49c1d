"""Questions to the person at the terminal: an approval, a confirmation, a hidden value, an address to open."""

from __future__ import annotations

import asyncio
import getpass
import sys
import termios
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from kiwi_mcp.domain.calls import Answers, Ask, Question, Questions, no_answers
from kiwi_mcp.domain.errors import InvalidRequest, PolicyDenied, Unanswered
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.safe_text import escape_controls
from kiwi_mcp.primitives import browser
from kiwi_mcp.surfaces.cli.screen import talk

_YES: JsonObject = {"action": "accept", "content": {"approve": True, "always": "none"}}
_NO: JsonObject = {"action": "decline"}
_SECRET_LIMIT = 100_000
_ONCE = frozenset({"y", "yes", "o", "once"})
_ALWAYS = {"this tool": frozenset({"t", "tool", "a", "always"}), "this server": frozenset({"s", "server"})}
_LETTERS = {"this tool": "always for this [t]ool", "this server": "always for this [s]erver"}


def owner_prompt(*, is_yes: bool) -> Ask:
    """Return how Kiwi's own questions are answered: by `--yes`, on the terminal, or not at all without one."""
    if not is_yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        return no_answers
    lock = asyncio.Lock()  # calls that run at once ask one after the other: there is one terminal

    async def ask(questions: Questions) -> Answers:
        # The questions of a tool are refused: on the command line, only Kiwi's own are asked.
        if not all(question.is_own for question in questions.values()):
            raise Unanswered(sorted({question.method for question in questions.values()}))
        if is_yes:
            return dict.fromkeys(questions, _YES)
        async with lock:
            return {key: await _asked(question) for key, question in questions.items()}

    return ask


def confirm(message: str, *, is_yes: bool) -> bool:
    """Ask for a confirmation on the terminal; without one, `--yes` is required."""
    ask = owner_prompt(is_yes=is_yes)
    if ask is no_answers:
        question = f"This needs a confirmation, and there is no terminal to ask on: {message}"
        raise PolicyDenied(question, suggestion="Add `--yes` to confirm it.")
    return asyncio.run(is_confirmed(message, ask))


async def is_confirmed(message: str, ask: Ask) -> bool:
    """Ask for a confirmation in a way of asking."""
    question = Question("elicitation/create", {"message": message}, is_own=True)
    return (await ask({"confirm": question}))["confirm"] == _YES


async def _asked(question: Question) -> JsonObject:
    talk(f"\n{as_text(question.params.get('message'))}\n")
    asked = as_object(as_object(question.params.get("requestedSchema")).get("properties"))
    _forget_typed()
    if texts := [name for name, field in asked.items() if as_object(field).keys() == {"type"}]:
        return {"action": "accept", "content": {texts[0]: (await _typed("> ")).strip()}}
    answers = tuple(map(as_text, as_list(as_object(asked.get("always")).get("enum"))))
    typed = (await _typed(_choices(answers, "[N]o") if answers else "[y]es / [N]o: ")).strip().lower()
    if always := _always(typed, answers):
        return {"action": "accept", "content": {"approve": True, "always": always}}
    return _YES if typed in _ONCE else _NO


def _choices(answers: Sequence[str], end: str) -> str:
    return " / ".join(["[y]es, once", *(_LETTERS[answer] for answer in answers if answer in _LETTERS), end]) + ": "


def _always(typed: str, answers: Sequence[str]) -> str:
    return next((answer for answer, letters in _ALWAYS.items() if answer in answers and typed in letters), "")


async def approval_answer(answers: Sequence[str]) -> dict[str, Json]:
    """Return the request that a typed answer to an approval means; empty to let it wait. `answers` are for later."""
    _forget_typed()
    typed = (await _typed(_choices(answers, "[n]o / Enter: later"))).strip().lower()
    if typed in {"n", "no"}:
        return {"action": "deny"}
    always = _always(typed, answers)
    return {"action": "approve", "always": always or "none"} if always or typed in _ONCE else {}


async def ask_text(message: str) -> str | None:
    """Show a question, and return the line that is typed; None at the end of the input."""
    talk(f"\n{message}")
    _forget_typed()
    line = await _typed("? ")
    return line.strip() if line else None


def _forget_typed() -> None:
    """Drop what was typed before the question was shown: it is no answer to it."""
    with suppress(termios.error, ValueError):  # no terminal, or one that is gone
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def _write(prompt: str) -> None:
    sys.stderr.write(escape_controls(prompt))
    sys.stderr.flush()


async def _typed(prompt: str) -> str:
    """Return a line that is typed; waiting for it can be cancelled, as a thread cannot."""
    _write(prompt)
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


def ask_network(rows: Iterable[JsonObject]) -> Mapping[str, Sequence[str]]:
    """Ask on the terminal which hosts imported servers may reach; without a terminal, nothing is allowed."""
    waiting = {as_text(row.get("server")): as_text(row.get("allow")) for row in rows if row.get("allow")}
    if not waiting or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return {}
    talk("\nThese servers start without a network. Type the hosts that each may reach; `any` is any public host.")
    granted: dict[str, Sequence[str]] = {}
    for name, line in waiting.items():
        named = [word for word in line.split()[4:] if word not in {"--host", "HOST"}]
        _forget_typed()
        first = f"[y] {' '.join(named)} / " if named else ""
        _write(f"{name:<24} {first}HOST / any / [Enter] nothing: ")
        words = sys.stdin.readline().replace(",", " ").split()
        hosts = named if words in (["y"], ["yes"]) else ["*"] if words in (["any"], ["*"]) else words
        if hosts:
            granted[name] = hosts
    return granted


def read_secret(name: str) -> str:
    """Return a value that no list of processes and no history of commands shows."""
    if sys.stdin.isatty():
        return getpass.getpass(f"Value of {name}: ", stream=sys.stderr)
    try:
        return sys.stdin.read(_SECRET_LIMIT).removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidRequest("Standard input is not text.", suggestion="Encode bytes as base64.") from error


async def show_address(questions: Questions) -> Answers:
    """Show the address of each question."""
    for question in questions.values():
        if question.method != "elicitation/create" or question.params.get("mode") != "url":
            raise Unanswered([question.method])
        talk(f"{as_text(question.params.get('message'))}\n\n{as_text(question.params.get('url'))}\n")
    return {key: {"action": "accept"} for key in questions}


async def open_address(questions: Questions) -> Answers:
    """Show the address of each question, and open it if a person sits at this machine."""
    answers = await show_address(questions)
    if sys.stderr.isatty():
        for question in questions.values():
            await asyncio.to_thread(browser.open_address, as_text(question.params.get("url")))
    return answers
