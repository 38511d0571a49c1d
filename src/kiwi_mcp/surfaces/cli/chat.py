"""`kiwi chat`: a conversation with a model, on a terminal or line by line from standard input."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Self, TypeVar

from msgspec import convert
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Answers, Caller, Questions, no_answers
from kiwi_mcp.domain.errors import ApprovalRequired, InvalidRequest, KiwiError, NotFound
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.threads import ENDED, TOKEN_CLASSES
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.paths import user_space
from kiwi_mcp.kernel.verbs import by_wire
from kiwi_mcp.kernel.verbs.thread import ThreadResponse, question_text, reply_text
from kiwi_mcp.kernel.view import first_sentence
from kiwi_mcp.surfaces.cli.inputs import typed
from kiwi_mcp.surfaces.cli.prompts import ask_text, owner_prompt
from kiwi_mcp.surfaces.cli.screen import Screen, show_error, talk
from kiwi_mcp.surfaces.cli.session import CliSession, progress_text, request_of, run
from kiwi_mcp.surfaces.cli.thread_screen import ThreadScreen

try:
    import readline
except ImportError:  # not every Python has it; lines are typed without history then
    readline = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from kiwi_mcp.surfaces.cli.rows import CommandRow

T = TypeVar("T")
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?")
_QUOTES = '"""'
_FAILED, _CANCELLED = 1, 143


def converse(_: CommandRow, options: JsonObject) -> int:
    """Talk with a model until the input ends or the conversation does."""
    cli = CliSession(options)
    with LoopThread() as loop:
        kernel = Kernel(cli.project, surface="cli")
        try:
            return Chat(kernel, loop, cli).run(options)
        finally:
            loop.run(kernel.aclose())


class LoopThread:
    """An event loop in a thread of its own: it runs also while `input` waits in the main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for work in (self._loop.shutdown_asyncgens(), self._loop.shutdown_default_executor()):
            self.run(work)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Run work to its end. Ctrl-C, and a signal to end the program, stop it and are raised once it has stopped."""
        made = Future[asyncio.Task[T]]()

        async def outcome() -> T:
            # In a task of its own, so that it can be stopped and still be waited for.
            task = asyncio.ensure_future(work)
            made.set_result(task)
            await asyncio.wait({task})
            return task.result()

        ended = asyncio.run_coroutine_threadsafe(outcome(), self._loop)
        ending = signal.SIGTERM, signal.SIGHUP  # no tool outlives the program
        before = {number: signal.signal(number, lambda *_: sys.exit(_CANCELLED)) for number in ending}
        try:
            return ended.result()
        except (KeyboardInterrupt, SystemExit):
            self._loop.call_soon_threadsafe(made.result().cancel)
            with suppress(CancelledError, KiwiError):
                ended.result()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def watch(row: CommandRow, options: JsonObject) -> int:
    """Show what happens in a thread until it ends or waits; Ctrl-C leaves it running."""
    cli, request, screen = CliSession(options), request_of(row, options), ThreadScreen()
    if cli.is_json:
        return cli.tell(row, request)

    async def work() -> int:
        async with cli.opened() as kernel:
            return _show_end(cli, row, await _followed(kernel, request, Caller(is_owner=True), screen), screen)

    try:
        return run(work())
    except KeyboardInterrupt:
        talk("The thread continues; `kiwi thread cancel` ends it.")
        raise


async def _followed(kernel: Kernel, request: JsonObject, caller: Caller, screen: ThreadScreen) -> Answer:
    """Make a request of the verb `thread`, show what happens meanwhile, and return the answer."""
    async with aclosing(kernel.thread_events(request, caller)) as events:
        async for event in events:
            if isinstance(event, Answer):
                screen.clear()
                return event
            screen.show(event)
    raise AssertionError("the last one is the answer")


def _show_end(cli: CliSession, row: CommandRow, answer: Answer, screen: ThreadScreen) -> int:
    """Show the thread at the end of a command; a result that was shown as text is not shown again."""
    screen.end_text()
    response = answer.response
    if isinstance(response, ThreadResponse) and screen.has_shown(response.result):
        answer = replace(answer, response=replace(response, result=None))
    return cli.show(answer, by_wire(row["wire"]))


def start_thread(row: CommandRow, options: JsonObject) -> int:
    """Start a thread, with its inputs read by the schema of its item."""
    cli, given = CliSession(options), as_object(options.get("inputs"))
    item = as_text(options["item_id"])
    schema = cli.read(lambda kernel: kernel.parameters_of(item, None)) if given else {}
    declared = as_object(schema.get("properties"))
    inputs = {name: typed(name, as_text(text), as_object(declared.get(name))) for name, text in given.items()}
    return _run_thread(cli, row, {**request_of(row, options), "inputs": inputs})


def answer_thread(row: CommandRow, options: JsonObject) -> int:
    """Answer a question; all further words are the answer."""
    words = [as_text(word) for word in as_list(options.get("answer"))]
    given = {"answer": " ".join(words)} if words else {}
    return _run_thread(CliSession(options), row, {**request_of(row, options), **given})


def resume_thread(row: CommandRow, options: JsonObject) -> int:
    """Continue a thread."""
    return _run_thread(CliSession(options), row, request_of(row, options))


def _run_thread(cli: CliSession, row: CommandRow, request: JsonObject) -> int:
    """Send a request about one thread; if the command waits, show what happens, and ask the person in place."""
    screen = ThreadScreen(is_silent=cli.is_json, has_turns=True)
    try:
        return run(_run_to_end(cli, row, request, screen))
    except KeyboardInterrupt:
        screen.end_text()
        if not screen.thread_id:
            raise
        status = as_text(cli.call("thread", {"action": "show", "thread_id": screen.thread_id}).content.get("status"))
        steps = "starts a new one" if status in ENDED else "continues it"
        command = "start" if status in ENDED else f"resume {screen.thread_id} --wait"
        talk(f"Stopped: the thread {screen.thread_id} is {status}.")
        talk(f"hint: `kiwi thread show {screen.thread_id}` shows what it did, `kiwi thread {command}` {steps}.")
        raise


async def _run_to_end(cli: CliSession, row: CommandRow, request: JsonObject, screen: ThreadScreen) -> int:
    prompt = owner_prompt(is_yes=False)

    async def ask(questions: Questions) -> Answers:
        screen.end_text()
        return await prompt(questions)

    def report(step: Progress) -> None:
        # Before its first event the command may wait for another process; later steps are what a tool prints.
        (screen.status if screen.thread_id else screen.note)(progress_text(step))

    caller = Caller(report, no_answers if prompt is no_answers else ask, is_owner=True)
    async with cli.opened() as kernel:
        answer = await _followed(kernel, request, caller, screen)
        own = answer.content["thread_id"]
        can_answer = prompt is not no_answers and not cli.is_json and bool(request.get("wait"))
        while can_answer and (asked := as_list(answer.content.get("questions"))):
            screen.end_text()
            question = as_object(asked[0])
            text = await ask_text(question_text(question))
            if text is None:  # the end of the input: the question stays open
                break
            reply: JsonObject = {"action": "answer", "question_id": question["question_id"], "answer": text}
            try:
                answer = await _followed(kernel, {**reply, "wait": True}, caller, screen)
            except InvalidRequest as error:
                show_error(error.to_response(), is_json=False)
                continue
            if answer.content["thread_id"] != own:  # it was a question of a child
                answer = await _followed(kernel, {"action": "resume", "thread_id": own, "wait": True}, caller, screen)
        return _show_end(cli, row, answer, screen)


class Chat:
    """One conversation, which is a thread in the store.

    `input` needs the main thread, for its signals and its history, so the event loop has another one. Child threads
    that the model did not wait for continue while the prompt waits.
    """

    def __init__(self, kernel: Kernel, loop: LoopThread, cli: CliSession) -> None:
        self._kernel = kernel
        self._loop = loop
        self._is_json = cli.is_json
        self._is_asked = not cli.is_json and sys.stdin.isatty() and sys.stdout.isatty()
        """Whether a person types at a terminal."""
        self._screen = ThreadScreen(is_silent=cli.is_json)
        self._ask = owner_prompt(is_yes=False) if self._is_asked else no_answers
        self._thread: JsonObject = {}
        """The conversation as it was after the last turn."""
        self._undone = ""
        """What the model does not know yet: the changes that were undone."""
        self._skills: list[Json] = []
        self._code = 0

    def run(self, options: JsonObject) -> int:
        """Start or continue the conversation, and send every message; return the exit code."""
        named, is_continued = as_text(options.get("thread_id")), bool(options.get("is_continued"))
        if named and not is_continued:
            raise InvalidRequest(
                "A message is typed after the prompt.", suggestion=f"Did you mean `kiwi chat --continue {named}`?"
            )
        answer = self._continued(named, options) if is_continued else self._started(options)
        if answer.is_error:
            show_error(answer.content, is_json=self._is_json)
            return answer.exit_code
        self._note(answer)
        lines = _Lines(is_asked=self._is_asked)
        if self._is_asked:
            self._screen.note(f"{as_text(self._thread.get('model'))}. /help shows commands, Ctrl-D ends.")
        try:
            while self._thread["status"] not in ENDED:
                if not self._is_asked and self._thread.get("waits_for") == "approval":
                    self._code = ApprovalRequired.exit_code  # without a terminal no call can be approved
                    break
                message = lines.read("? " if self._thread.get("questions") else "> ")
                if message is None or not self._is_handled(message):
                    break
        finally:
            lines.close()
        return self._code

    def _started(self, options: JsonObject) -> Answer:
        wanted: JsonObject = {"action": "start", "item_id": options.get("directive") or "chat", "conversation": True}
        request = {**wanted, **{name: options[name] for name in ("model",) if name in options}}
        return self._loop.run(self._kernel.call("thread", request, Caller(ask=self._ask, is_owner=True)))

    def _continued(self, named: str, options: JsonObject) -> Answer:
        """Return the conversation that is named, or the newest one of this project, and show its last reply."""
        if options.get("directive"):
            raise InvalidRequest("A conversation keeps its directive.", suggestion="Leave `--directive` out.")
        listed = self._call("thread", {"action": "list", "conversations": True, "limit": 100}).content
        known = [as_object(one) for one in as_list(listed.get("threads"))]
        newest = next((as_text(one["thread_id"]) for one in known if one["status"] not in ENDED), "")
        if not (named or newest):
            raise NotFound("This project has no conversation to continue.", suggestion="`kiwi chat` starts one.")
        shown = self._call("thread", {"action": "show", "thread_id": named or newest})
        if shown.is_error:
            return shown
        if shown.content.get("kind") != "conversation" or shown.content["status"] in ENDED:
            suggestion = "`kiwi thread list --conversations` lists those of this project."
            raise InvalidRequest(f"{named or newest} is no conversation that can continue.", suggestion=suggestion)
        events = [as_object(one) for one in as_list(shown.content.get("events"))]
        if text := next((reply_text(one) for one in reversed(events) if one.get("kind") == "model"), ""):
            self._screen.note(text, style="", is_whole=True)
        request: JsonObject = {"action": "resume", "thread_id": shown.content["thread_id"]}
        if "model" in options:
            return self._call("thread", {**request, "model": options["model"]})
        # What it waited for may have happened since; a question is answered at the prompt.
        is_idle = shown.content.get("waits_for") == "message" or shown.content.get("questions")
        return shown if is_idle else self._loop.run(self._turn({**request, "wait": True}))

    def _is_handled(self, message: str) -> bool:
        """Send a message or carry out a command; return False if it ends the conversation."""
        command = _COMMAND.fullmatch(message.strip())
        if not message.strip():
            return True
        if command and command[1] in {"quit", "exit"}:
            return False
        try:
            if command is None:
                self._send(message)
            elif (act := _COMMANDS.get(command[1])) is not None:
                act(self, (command[2] or "").strip())
            else:
                fix = "A message that begins with a blank is sent as it is. /help shows the commands."
                raise InvalidRequest(f"There is no command /{command[1]}.", suggestion=fix)
        except KiwiError as error:
            self._screen.end_text()
            show_error(error.to_response(), is_json=self._is_json)
            self._code = error.exit_code
        except KeyboardInterrupt:
            self._screen.note("stopped")
            self._note(self._own("show"))
        return True

    def _send(self, message: str) -> None:
        """Send a message, or the answer to the question that is open, and show the turn."""
        questions, own = as_list(self._thread.get("questions")), self._thread["thread_id"]
        if questions:
            question = as_object(questions[0])["question_id"]
            request: JsonObject = {"action": "answer", "question_id": question, "answer": message, "wait": True}
        else:
            text, self._undone = f"{self._undone}{message}", ""
            skills, self._skills = self._skills, []
            request = {"action": "resume", "thread_id": own, "message": text, "skills": skills, "wait": True}
        first = len(self._screen.calls)
        answer = self._loop.run(self._turn(request))
        if answer.content["thread_id"] != own:  # a question of a child
            answer = self._loop.run(self._turn({"action": "resume", "thread_id": own, "wait": True}))
        self._note(answer)
        self._code = _FAILED if self._screen.error or self._thread["status"] == "failed" else 0
        if self._is_json:
            calls: list[Json] = [{"name": call.name, "status": call.status} for call in self._screen.calls[first:]]
            names = ("thread_id", "status", "waits_for", "model", "usage", "questions", "approvals", "message")
            known = {name: self._thread[name] for name in names if name in self._thread}
            error: JsonObject = {"error": self._screen.error} if self._screen.error else {}
            sys.stdout.write(f"{compact({'text': self._screen.text, 'calls': calls, **known, **error})}\n")
            sys.stdout.flush()

    async def _turn(self, request: JsonObject) -> Answer:
        self._screen.begin_turn()
        caller = Caller(ask=self._asked if self._ask is not no_answers else no_answers, is_owner=True)
        return await _followed(self._kernel, request, caller, self._screen)

    async def _asked(self, questions: Questions) -> Answers:
        self._screen.end_text()
        return await self._ask(questions)

    def _note(self, answer: Answer) -> None:
        """Take the state of the conversation, and show it."""
        self._thread = {key: value for key, value in answer.content.items() if key != "events"}
        if self._is_json:
            return
        if message := as_text(self._thread.get("message")):
            self._screen.note(message, is_whole=True)
        for question in map(as_object, as_list(self._thread.get("questions"))):
            self._screen.note(question_text(question), style="", is_whole=True)
        for approval in as_list(self._thread.get("approvals")):
            self._screen.note(f"waits for an approval: `kiwi approvals approve {approval}`")
        if as_object(self._thread["usage"])["turns"]:
            self._screen.note(usage_line(self._thread))

    def undo(self, _: str) -> None:
        """Undo the newest change to files."""
        ours = {as_object(event).get("run_id") for event in as_list(self._own("show").content.get("events"))}
        listed = [as_object(one) for one in as_list(self._call("undo", {"action": "list"}).content.get("checkpoints"))]
        left = ours - {one.get("undoes") for one in listed}
        run = next((one for one in listed if one.get("run_id") in left), None)
        if run is None:
            self._screen.note("No change of this conversation can be undone.")
            return
        answer = self._call("undo", {"action": "apply", "run_id": run["run_id"]})
        self._show(answer, ("undo", "apply"))
        if not answer.is_error:
            # The model is told with the next message.
            self._undone += f"(I undid what {as_text(run.get('tool_id'))} changed, run {run['run_id']}.)\n\n"

    def tools(self, _: str) -> None:
        """List the tools that the model sees."""
        events = map(as_object, as_list(self._own("show").content.get("events")))
        prompt = next((one for one in events if one.get("kind") == "prompt"), {})
        for tool in map(as_object, as_list(prompt.get("tools"))):
            about = first_sentence(as_text(tool.get("description")))
            self._screen.note(f"{as_text(tool.get('name')):<20} {about}", style="")

    def cost(self, _: str) -> None:
        """Show what the conversation cost."""
        self._show(self._own("costs"), ("thread", "costs"))
        self._screen.note(usage_line(self._thread))

    def model(self, words: str) -> None:
        """Show the model; with a name, continue with that one."""
        if words:
            answer = self._own("resume", model=words)
            if answer.error is not None:
                raise answer.error
            self._thread = answer.content
        self._screen.note(as_text(self._thread.get("model")))

    def skill(self, words: str) -> None:
        """List the skills; with a name, load that one."""
        if not words:
            self._show(self._call("skill", {"action": "list"}), ("skill", "list"))
            return
        answer = self._call("load", {"item_id": words, "item_type": "skill"})
        if answer.error is not None:
            raise answer.error
        self._skills.append(words)
        self._screen.note(f"{words} is loaded with your next message.")

    def expand(self, words: str) -> None:
        """Show the last call whole; with a number, that one."""
        calls = [call for call in self._screen.calls if not words or str(call.number) == words]
        if not calls:
            self._screen.note("There is no such call.")
            return
        self._screen.expand(calls[-1])

    def help(self, _: str) -> None:
        """Show the commands."""
        for name, act in _COMMANDS.items():
            self._screen.note(f"/{name:<8} {act.__doc__}", style="")
        self._screen.note('A line that ends with \\ continues; """ begins and ends several lines.', style="")
        self._screen.note("Ctrl-C stops the turn, Ctrl-O is /expand, Ctrl-D or /quit ends.", style="")

    def _show(self, answer: Answer, wire: tuple[str, ...]) -> None:
        verb = by_wire(wire)
        if answer.is_error:
            show_error(answer.content, is_json=False)
        elif verb.view is not None:
            Screen().show(verb.view(answer.response or convert(answer.content, verb.response)))

    def _call(self, verb: str, request: JsonObject) -> Answer:
        return self._loop.run(self._kernel.call(verb, request, Caller(is_owner=True)))

    def _own(self, action: str, **arguments: Json) -> Answer:
        """Make a request about the thread of this conversation."""
        return self._call("thread", {"action": action, "thread_id": self._thread["thread_id"], **arguments})


_COMMANDS: Mapping[str, Callable[[Chat, str], None]] = {
    act.__name__: act for act in (Chat.undo, Chat.tools, Chat.cost, Chat.model, Chat.skill, Chat.expand, Chat.help)
}
"""The commands inside a conversation; the docstring of each is its line in `/help`."""


def usage_line(thread: JsonObject) -> str:
    """Return what a thread used, of what it may use."""
    usage, limits = as_object(thread["usage"]), as_object(thread["limits"])
    tokens = sum(int(str(usage[name])) for name in TOKEN_CLASSES)
    spend, most = float(str(usage["spend"])), float(str(limits["spend"]))
    turns = f"{usage['turns']} of {limits['turns']} turns"
    return f"{as_text(thread.get('model'))} · {turns} · {tokens:,} tokens · {spend:.4f} of {most:.2f} USD"


class _Lines:
    """Messages that are typed or piped, each of one or several lines; typed ones are in a history."""

    def __init__(self, *, is_asked: bool) -> None:
        self._is_asked = is_asked
        self._path: Path | None = None
        if is_asked and readline is not None:
            self._path = user_space() / "state" / "chat_history"
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
            with suppress(OSError):  # damaged: it begins anew
                readline.read_history_file(self._path)
            readline.set_history_length(1_000)
            readline.parse_and_bind(r'"\C-o": "\C-a\C-k/expand\C-m"')

    def read(self, prompt: str) -> str | None:
        """Return the next message; None at the end of the input."""
        if not self._is_asked:
            prompt = ""
        while True:
            try:
                return self._message(prompt, "… " if self._is_asked else "")
            except KeyboardInterrupt:  # what was typed is dropped
                sys.stdout.write("\n")
            except EOFError:
                if self._is_asked:
                    sys.stdout.write("\n")
                return None
            except UnicodeDecodeError as error:
                raise InvalidRequest("The input is not text.", suggestion="Send UTF-8.") from error

    def _message(self, prompt: str, further: str) -> str:
        lines = [input(prompt)]
        if lines[0].startswith(_QUOTES):
            lines = [lines[0].removeprefix(_QUOTES)]
            while not lines[-1].endswith(_QUOTES):
                lines.append(input(further))
            return "\n".join(lines).removesuffix(_QUOTES).strip("\n")
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(further))
        return "\n".join(lines)

    def close(self) -> None:
        """Store the history, which only its owner can read."""
        if self._path is not None and readline is not None:
            with suppress(OSError):
                readline.write_history_file(self._path)
                self._path.chmod(0o600)
