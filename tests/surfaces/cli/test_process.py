"""The command as a separate process: streams, exit codes, terminals and pipes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

ECHO = (
    "tool_id: {name}\ntool_type: script\nversion: 1.0.0\nexecutor: bash_runtime\ndescription: x\n"
    "config: {{entrypoint: main.sh}}\nparameters: [{{name: word, type: string}}]\n"
)
EVIL = "\x1b]0;evil\x07\x1b[31mred"


@pytest.fixture(autouse=True)
def tools(project: Path, processes: None) -> None:
    for name, code in {
        "echo": 'printf "%s" "$KIWI_PARAM_word"\n',
        "evil": "printf '\\033]0;evil\\007\\033[31mred'\nprintf '\\033[2Jgone' >&2\n",
        "long": "head -c 60000 /dev/zero | tr '\\0' x\n",
        "fail": "echo no >&2\nexit 9\n",
    }.items():
        folder = project / ".ai" / "tools" / name
        folder.mkdir(parents=True)
        (folder / "tool.yaml").write_text(ECHO.format(name=name))
        (folder / "main.sh").write_text(code)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kiwi_mcp", *words]


def kiwi(project: Path, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), cwd=project, input=text, capture_output=True, check=False, text=True, timeout=120
    )


def on_a_terminal(project: Path, *words: str, answer: str = "") -> str:
    """Run a command with a terminal as its three streams, answer its question, and return all its output."""
    leader, follower = pty.openpty()
    started = subprocess.Popen(command(*words), cwd=project, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    written, end = b"", monotonic() + 120
    while monotonic() < end:
        try:
            part = os.read(leader, 65_536)
        except OSError:  # the last writer has gone
            break
        if not part:
            break
        written += part
        if answer and b"[N]o: " in written:
            os.write(leader, f"{answer}\n".encode())
            answer = ""
    os.close(leader)
    assert started.wait(120) == 0
    return written.decode(errors="replace")


def test_data_goes_to_stdout_messages_to_stderr_and_failure_to_the_exit_code(project: Path) -> None:
    good, bad, lost = (kiwi(project, "run", name) for name in ("echo", "fail", "lost"))

    assert (good.returncode, good.stdout) == (0, "\n")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("no\nerror: `fail` ended with exit code 9")
    assert (lost.returncode, lost.stdout) == (3, "")


@pytest.mark.smoke
def test_a_request_is_read_from_standard_input(project: Path) -> None:
    request = json.dumps({"item_id": "echo", "parameters": {"word": "žluť"}})

    ended = kiwi(project, "call", "execute", "-", text=request)

    assert json.loads(ended.stdout)["result"] == "žluť"
    assert ended.stderr == ""


@pytest.mark.case("UNI-03")
def test_control_sequences_of_a_tool_are_raw_in_a_pipe_and_escaped_on_a_terminal(project: Path) -> None:
    piped = kiwi(project, "run", "evil")
    shown = on_a_terminal(project, "run", "evil", answer="n")
    raw = on_a_terminal(project, "run", "evil", "--raw", answer="n")

    assert piped.stdout == f"{EVIL}\n"
    assert "is it yours?" in shown
    assert "\x1b]0;evil" not in shown
    assert "\x1b[2J" not in shown
    assert "\\x1b]0;evil\\x07\\x1b[31mred" in shown
    assert EVIL in raw
    assert "\x1b[2J" not in piped.stderr


def test_a_reader_that_closes_early_is_not_an_error(project: Path) -> None:
    started = subprocess.Popen(command("run", "long"), cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.close()

    talk = started.stderr.read().decode()
    started.stderr.close()

    assert started.wait(120) in {0, 1, 141}
    assert "Traceback" not in talk


def test_a_terminal_with_another_encoding_gets_text(project: Path) -> None:
    request = json.dumps({"item_id": "echo", "parameters": {"word": "žluť ✓"}})
    env = {**os.environ, "LC_ALL": "C"}

    ended = subprocess.run(
        command("call", "execute", request), cwd=project, capture_output=True, check=False, timeout=120, env=env
    )

    assert json.loads(ended.stdout)["result"] == "žluť ✓"


@pytest.mark.smoke
def test_the_installed_script_and_the_module_are_one_command(project: Path) -> None:
    script = Path(sys.prefix, "bin", "kiwi")
    entry = subprocess.run([script, "version"], capture_output=True, check=False, text=True, timeout=120)

    assert entry.stdout == kiwi(project, "version").stdout
