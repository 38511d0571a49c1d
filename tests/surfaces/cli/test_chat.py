"""`kiwi chat` on a pseudo-terminal, and without a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import stat
import struct
import subprocess
import sys
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl
from functools import partial
from pathlib import Path
from threading import Event

import pytest
from tests.kernel.threads.conftest import ALL_TOOLS, DIRECTIVE, write_provider
from tests.plugins.scripted_model import ModelRequest, ScriptedModel, fail, say, stall, use

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.timeout(240)]
CTRL_C, CTRL_D, CTRL_O = "\x03", "\x04", "\x0f"
PATIENCE = 120.0
LAUNCH = """import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"""
"""Makes the terminal that of its session, so that its keys send signals, and becomes the program."""
STYLE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


class Terminal:
    """A person at a terminal on which `kiwi chat` runs."""

    def __init__(self, file: int, process: subprocess.Popen[bytes]) -> None:
        self._file = file
        self.process = process
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self.screen = ""
        """Everything that was written, with its control sequences."""
        self._seen = 0

    def type(self, text: str) -> None:
        """Type a text, without the key that sends it."""
        os.write(self._file, text.encode())

    def send(self, line: str) -> None:
        """Type a line at the prompt, and send it."""
        self.until("> ")
        self.type(f"{line}\r")

    def until(self, wanted: str, key: str = "") -> str:
        """Return what was written since the last time, up to a text, without styles; press a key until it appears."""
        end = time.monotonic() + PATIENCE
        while wanted not in (new := self._plain()[self._seen :]):
            assert time.monotonic() < end, new
            if select.select([self._file], [], [], 1)[0]:
                self.screen += self._decoder.decode(os.read(self._file, 65_536))
            elif key:
                self.type(key)
        place = new.index(wanted) + len(wanted)
        self._seen += place
        return new[:place]

    def _plain(self) -> str:
        return STYLE.sub("", self.screen).replace("\r\n", "\n")

    def end(self) -> int:
        """Type Ctrl-D at the prompt, and return the exit code."""
        self.until("> ")
        self.type(CTRL_D)
        return self.process.wait(PATIENCE)


@pytest.fixture
def user(home: Path, scripted_model: ScriptedModel) -> Path:
    """The owner's folder, with the scripted model as provider."""
    (home / ".ai" / "tools").mkdir(parents=True)
    write_provider(home / ".ai", scripted_model, "openai_chat")
    return home / ".ai"


@contextmanager
def chatting(project: Path, verb: Sequence[str] = ("chat",), **env: str) -> Iterator[Terminal]:
    own, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-c", LAUNCH, "-m", "kiwi_mcp", *verb]
    inherited = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS"}}
    process = subprocess.Popen(
        command,
        cwd=project,
        env={**inherited, "TERM": "xterm", **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    with process:
        try:
            yield Terminal(own, process)
        finally:
            process.kill()
    os.close(own)


@pytest.mark.usefixtures("user")
def test_text_streams_as_markdown_and_a_status_line_ends_the_turn(project: Path, scripted_model: ScriptedModel) -> None:
    scripted_model.will(say("# Kiwis\n- **small** birds\n- they `do not` fly\n"))
    with chatting(project) as terminal:
        terminal.send("What are kiwis?")
        shown = terminal.until("USD")
        assert "Kiwis\n• small birds\n• they do not fly\n" in shown
        assert "scripted_llm/scripted-1 · 1 of 1000 turns · 120 tokens · 0.0000 of 5.00 USD" in shown
        assert "\x1b[1mKiwis\x1b[0m" in terminal.screen
        assert terminal.end() == 0


@pytest.mark.usefixtures("user")
def test_ctrl_c_stops_the_turn_and_not_the_program(project: Path, scripted_model: ScriptedModel) -> None:
    scripted_model.will(stall("One, two, three, four, five"), say("I am here."))
    with chatting(project) as terminal:
        terminal.send("Count")
        terminal.until("One, two")
        terminal.type(CTRL_C)
        terminal.until("stopped")
        terminal.send("Are you there?")
        terminal.until("I am here.")
        assert terminal.end() == 0
    sent = json.dumps(scripted_model.requests[-1].messages)
    assert "One, two" in sent
    assert "Are you there?" in sent


def test_a_child_continues_while_the_prompt_waits(project: Path, scripted_model: ScriptedModel, user: Path) -> None:
    (user / "directives").mkdir()
    words = {"permissions": ALL_TOOLS, "limits": "", "outputs": "", "model": ""}
    (user / "directives" / "study.md").write_text(DIRECTIVE.format(name="study", **words))
    run = partial(subprocess.run, cwd=project, check=True, capture_output=True)
    run([sys.executable, "-m", "kiwi_mcp", "sign", "study"])
    is_prompted, asked = Event(), Event()

    def hold(request: ModelRequest) -> None:
        if "Half." in str(request.json):
            asked.set()
        elif "Look into kiwis." in str(request.json) and len(request.messages) > 2:
            is_prompted.wait(PATIENCE)

    scripted_model.on_request = hold
    child = [use("help", topic="tool"), say("Half.") & use("help", topic="tool"), say("Done.")]
    own = [use("spawn", item="study"), say("It runs.")]
    scripted_model.will_by_text({"Look into kiwis.": child, "This is a conversation": own})
    with chatting(project) as terminal:
        terminal.send("Begin")
        terminal.until("USD")
        terminal.until("> ")
        is_prompted.set()
        assert asked.wait(PATIENCE)  # nothing was typed
        terminal.type(CTRL_D)
        assert terminal.process.wait(PATIENCE) == 0


@pytest.mark.usefixtures("user")
def test_ctrl_c_at_the_prompt_drops_what_was_typed(project: Path, scripted_model: ScriptedModel) -> None:
    scripted_model.will(say("Hello."))
    with chatting(project) as terminal:
        terminal.until("> ")
        terminal.type("never sent")
        terminal.until("never sent")
        # Python's `input` does not see a signal that arrives between two keys before the next key.
        terminal.until("> ", key=CTRL_C)
        terminal.type("Hi\r")
        terminal.until("Hello.")
        assert terminal.end() == 0
    assert "never sent" not in json.dumps(scripted_model.requests[0].messages)


@pytest.mark.usefixtures("user")
def test_several_lines_are_one_message(project: Path, scripted_model: ScriptedModel) -> None:
    scripted_model.will(say("One."), say("Two."))
    with chatting(project) as terminal:
        terminal.send("first\\")
        terminal.until("… ")
        terminal.type("second\r")
        terminal.until("One.")
        terminal.send('"""third')
        terminal.until("… ")
        terminal.type('fourth"""\r')
        terminal.until("Two.")
        assert terminal.end() == 0
    sent = json.dumps(scripted_model.requests[-1].messages)
    assert r"first\nsecond" in sent
    assert r"third\nfourth" in sent


@pytest.mark.case("UNI-03")
@pytest.mark.usefixtures("user")
def test_control_sequences_of_models_and_tools_are_escaped(project: Path, scripted_model: ScriptedModel) -> None:
    evil = "before\x1b]0;owned\x07\x1b[2Jafter\u202e"
    scripted_model.will(use("help", topic="\x1b[31mred"), say(evil))
    with chatting(project) as terminal:
        terminal.send("Show")
        terminal.until("after")
        terminal.send("/expand")
        terminal.until("> ")
        terminal.type(CTRL_D)
        terminal.process.wait(PATIENCE)
    assert "before\\x1b]0;owned\\x07\\x1b[2Jafter\\u{202e}" in terminal.screen
    assert not any(part in terminal.screen for part in ("\x1b]0;", "\x1b[2J", "\x1b[31mred", "\u202e"))


@pytest.mark.usefixtures("sandbox", "user")
def test_an_approval_is_asked_in_place_and_the_call_is_one_line(project: Path, scripted_model: ScriptedModel) -> None:
    folder = project / ".ai" / "tools" / "greet"
    folder.mkdir(parents=True)
    manifest = {"tool_id": "greet", "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0"}
    more = {"config": {"entrypoint": "main.sh"}, "mutates_state": True, "needs": {"write": ["note.txt"]}}
    (folder / "tool.yaml").write_text(json.dumps({**manifest, **more}))
    (folder / "main.sh").write_text("echo hello from the tool")
    (project / "note.txt").write_text("old\n")
    scripted_model.will(use("execute", item_id="greet"), say("Done."))
    with chatting(project) as terminal:
        terminal.send("Greet")
        terminal.until("[N]o: ")
        terminal.type("y\r")
        shown = terminal.until("Done.")
        assert re.search(r'\[1\] execute \{"item_id": "greet"\}  ok \d+\.\d s\n', shown)
        terminal.until("USD")
        terminal.until("> ")
        terminal.type(CTRL_O)
        assert "hello from the tool" in terminal.until("hello from the tool")
        assert terminal.end() == 0


@pytest.mark.usefixtures("user")
def test_a_question_of_the_model_is_answered_by_typing(project: Path, scripted_model: ScriptedModel) -> None:
    scripted_model.will(use("ask", question="Which colour?", choices=["red", "green"]), say("Green it is."))
    with chatting(project) as terminal:
        terminal.send("Paint it")
        terminal.until("question: Which colour? (red, green)")
        terminal.until("? ")
        terminal.type("blue\r")
        terminal.until("error: ")
        terminal.until("? ")
        terminal.type("green\r")
        terminal.until("Green it is.")
        assert terminal.end() == 0


def test_commands_show_tools_costs_and_the_model(project: Path, scripted_model: ScriptedModel, user: Path) -> None:
    write_provider(user, scripted_model, "anthropic", name="other_llm")
    scripted_model.will(say("One."), say("Two."))
    with chatting(project) as terminal:
        terminal.send("/help")
        assert "/undo" in terminal.until("Ctrl-D or /quit ends.")
        terminal.send("/tools")
        assert "return" not in terminal.until("wait ")
        terminal.send("Hi")
        terminal.until("USD")
        terminal.send("/cost")
        assert "0.000000 USD, 1 turn, tokens: 100 input" in terminal.until("1 of 1000 turns")
        terminal.send("/model nothing/of-that")
        terminal.until("error: ")
        terminal.send("/model other_llm/scripted-1")
        terminal.until("other_llm/scripted-1")
        terminal.send("/nonsense")
        terminal.until("There is no command /nonsense.")
        terminal.send("/undo")
        terminal.until("No change of this conversation can be undone.")
        terminal.send("Again")
        terminal.until("Two.")
        terminal.send("/quit")
        assert terminal.process.wait(PATIENCE) == 0
    assert [request.dialect for request in scripted_model.requests] == ["openai_chat", "anthropic"]
    history = user / "state" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "Again" in history.read_text()


@pytest.mark.usefixtures("sandbox", "user")
def test_undo_puts_files_back_and_the_model_sees_it(project: Path, scripted_model: ScriptedModel) -> None:
    folder = project / ".ai" / "tools" / "write_note"
    folder.mkdir(parents=True)
    manifest = {"tool_id": "write_note", "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0"}
    more = {"config": {"entrypoint": "main.sh"}, "mutates_state": True, "needs": {"write": ["note.txt"]}}
    (folder / "tool.yaml").write_text(json.dumps({**manifest, **more}))
    (folder / "main.sh").write_text("echo new > note.txt")
    (project / "note.txt").write_text("old\n")
    scripted_model.will(use("execute", item_id="write_note", checkpoint=True), say("Written."), say("I see."))
    with chatting(project) as terminal:
        terminal.send("Write it")
        terminal.until("[N]o: ")
        terminal.type("y\r")
        terminal.until("Written.")
        assert (project / "note.txt").read_text() == "new\n"
        terminal.send("/undo")
        terminal.until("> ")
        assert (project / "note.txt").read_text() == "old\n"
        terminal.type("What now?\r")
        terminal.until("I see.")
        assert terminal.end() == 0
    assert "I undid what write_note changed" in json.dumps(scripted_model.requests[-1].messages)


@pytest.mark.usefixtures("user")
def test_without_colour_markdown_is_shown_as_it_was_written(project: Path, scripted_model: ScriptedModel) -> None:
    scripted_model.will(say("# Kiwis\n**small** \x1b[31mbirds\n"))
    with chatting(project, NO_COLOR="1") as terminal:
        terminal.send("What?")
        assert "# Kiwis\n**small** \\x1b[31mbirds\n" in terminal.until("USD")
        assert "\x1b[1m" not in terminal.screen


def piped(project: Path, given: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `kiwi chat` with lines on its standard input."""
    command = [sys.executable, "-m", "kiwi_mcp", "chat", *words]
    return subprocess.run(
        command, cwd=project, input=given, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.usefixtures("user")
def test_without_a_terminal_each_line_is_a_turn(project: Path, scripted_model: ScriptedModel) -> None:
    scripted_model.will(say("One."), use("help"), say("Two."))
    done = piped(project, "first\nsecond\n")
    assert (done.returncode, done.stdout) == (0, "One.\nTwo.\n"), done.stderr
    assert "[1] help {}  ok" in done.stderr


@pytest.mark.usefixtures("user")
def test_a_conversation_continues_and_is_not_listed_while_it_is_idle(
    project: Path, scripted_model: ScriptedModel
) -> None:
    assert "no conversation to continue" in piped(project, "hi\n", "--continue").stderr
    scripted_model.will(say("One."), say("Two."), say("Three."))
    assert piped(project, "I am Ada\n").returncode == 0
    listed = kiwi(project, "thread", "list")
    assert (listed.stdout, "There are no threads" in listed.stderr) == ("", True)
    (row,) = kiwi(project, "thread", "list", "--conversations").stdout.splitlines()
    assert kiwi(project, "thread", "list", "--all").stdout.split()[0] == row.split()[0]
    done = piped(project, "Who am I?\n", "--continue")
    assert (done.returncode, done.stdout) == (0, "Two.\n"), done.stderr
    assert "One." in done.stderr
    assert "I am Ada" in json.dumps(scripted_model.requests[-1].messages)
    assert piped(project, "And now?\n", "--continue", row.split()[0]).stdout == "Three.\n"
    assert piped(project, "hi\n", "hello").returncode == 4


@pytest.mark.usefixtures("user")
def test_json_has_one_object_for_each_turn(project: Path, scripted_model: ScriptedModel) -> None:
    scripted_model.will(say("One."), use("help"), use("ask", question="Sure?"), say("Two."), fail(401))
    done = piped(project, "first\nsecond\nyes\nthird\n", "--json")
    one, two, three, four = map(json.loads, done.stdout.splitlines())
    assert (one["text"], one["calls"], one["status"], one["waits_for"]) == ("One.", [], "waiting", "message")
    assert (two["waits_for"], two["questions"][0]["message"]) == ("question", "Sure?")
    assert [call["name"] for call in two["calls"]] == ["help", "ask"]
    assert (three["text"], three["usage"]["turns"]) == ("Two.", 4)
    assert four["error"]
    assert done.returncode == 1, done.stderr


@pytest.mark.usefixtures("user")
def test_an_unknown_directive_or_model_is_an_error(project: Path) -> None:
    assert piped(project, "hi\n", "--directive", "lost").returncode == 3
    done = piped(project, "hi\n", "--model", "scripted_llm/lost")
    assert done.returncode != 0
    assert "lists no model 'lost'" in done.stderr


@pytest.mark.usefixtures("processes")
def test_watch_shows_the_text_live_and_ctrl_c_leaves_the_thread_running(
    project: Path, scripted_model: ScriptedModel, user: Path
) -> None:
    write_directive(user)
    scripted_model.will(stall("One, two, three, four"))
    started = json.loads(kiwi(project, "thread", "start", "study", "--json").stdout)
    with chatting(project, verb=("thread", "watch", started["thread_id"])) as terminal:
        terminal.until("One, two")
        terminal.type(CTRL_C)
        terminal.until("The thread continues")
        assert terminal.process.wait(PATIENCE) == 130
    assert json.loads(kiwi(project, "thread", "show", started["thread_id"], "--json").stdout)["status"] == "running"
    assert "running" in kiwi(project, "thread", "list").stdout
    kiwi(project, "thread", "cancel", started["thread_id"])


def test_start_on_a_terminal_asks_in_place_and_ctrl_c_says_what_became_of_the_thread(
    project: Path, scripted_model: ScriptedModel, user: Path
) -> None:
    write_directive(user)
    scripted_model.will(use("ask", question="Which colour?", choices=["red", "blue"]), say("Blue it is."))
    with chatting(project, verb=("thread", "start", "study", "--wait")) as terminal:
        terminal.until("question: Which colour? (red, blue)\n? ")
        terminal.type("green\r")
        terminal.until("hint: Answer `red` or `blue`.")
        terminal.until("\n? ")
        terminal.type("blue\r")
        shown = terminal.until("USD")
        assert shown.count("Blue it is.") == 1
        assert terminal.process.wait(PATIENCE) == 0
    scripted_model.will(stall("One, two, three, four"))
    with chatting(project, verb=("thread", "start", "study", "--wait")) as terminal:
        terminal.until("One, two")
        terminal.type(CTRL_C)
        terminal.until("is cancelled.\nhint: `kiwi thread show ")
        assert terminal.process.wait(PATIENCE) == 130


@pytest.mark.usefixtures("sandbox")
def test_run_of_a_thread_item_prints_only_its_result(project: Path, scripted_model: ScriptedModel, user: Path) -> None:
    write_directive(user)
    manifest = {"tool_id": "studies", "tool_type": "thread", "executor": "scripted_llm", "version": "1.0.0"}
    (user / "tools" / "studies.yaml").write_text(json.dumps({**manifest, "config": {"directive": "study"}}))
    kiwi(project, "sign", "studies")
    scripted_model.will(use("help"), say("Kiwis are birds."))
    done = kiwi(project, "run", "studies", "--yes")
    assert (done.returncode, done.stdout) == (0, "Kiwis are birds.\n"), done.stderr
    assert "studies: success" in done.stderr
    shown = kiwi(project, "thread", "show", kiwi(project, "thread", "list").stdout.split()[0]).stdout
    assert "model         help {}" in shown
    assert "model         Kiwis are birds." in shown


def write_directive(user: Path) -> None:
    """Write a directive of the owner, signed."""
    (user / "directives").mkdir(parents=True)
    words = {"name": "study", "permissions": ALL_TOOLS, "limits": "", "outputs": "", "model": ""}
    (user / "directives" / "study.md").write_text(DIRECTIVE.format(**words))
    kiwi(user, "sign", "study", "--type", "directive")


def kiwi(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    command = [sys.executable, "-m", "kiwi_mcp", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
