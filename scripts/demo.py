"""A tour of Kiwi that really runs: `make demo`.

The steps are in `demo/tour.yaml`. They run in a home and a project that exist for this tour only, each command is typed
to a real shell, and each step is held against what it says. The exit code is 0 only if every step did that.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import cast
from urllib.parse import parse_qs, urlsplit

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, TextContent
from rich.console import Console
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.manifest.document import read_yaml

TOUR = Path(__file__).resolve().parent / "demo" / "tour.yaml"
COMMAND_LIMIT = 300.0
"""Seconds for one command: the first one may have to fetch a package."""
CALL_LIMIT = 60.0
LINES_SHOWN = 20
WIDTH_SHOWN = 300
NEEDED = {
    "kiwi": "Run `make setup`, then `make demo`.",
    "git": "Install git with your system's package manager, such as `apt-get install git`.",
    "bash": "Install bash with your system's package manager.",
    "node": "Run `make setup`, which installs it, then `make demo`.",
    "perl": "Install perl with your system's package manager, such as `apt-get install perl`.",
}
LEXERS = {".md": "markdown", ".py": "python", ".sh": "bash", ".mjs": "javascript", ".pl": "perl", ".yaml": "yaml"}
CITIES = ("Oslo", "Oulu", "Rome")

SPEC = "# Spec\n\nFor the bird club. It counts kiwis.\n"
TURNS: Mapping[str, Sequence[Mapping[str, JsonObject]]] = {
    "report": (
        {
            "size": {"count": 3_145_728},
            "count_words": {"text": "a kiwi is a bird"},
            "median": {"numbers": [3, 1, 2]},
        },
        {"ask": {"question": "Who gets the report?"}},
        {"return": {"report": "3.0 MiB, 5 words, median 2"}},
    ),
    "spec": (
        {"skill": {"name": "interview"}},
        {"ask": {"question": "Who is it for, and what must it do?"}},
        {"files_write": {"path": "docs/spec.md", "content": SPEC}},
        {"git_init": {}},
        {"git_commit": {"message": "Add the spec", "paths": ["docs/spec.md"]}},
        {"return": {"path": "docs/spec.md"}},
    ),
}
"""The turns of the model in each directive, with the calls of each turn."""


class Surprise(Exception):
    """A step that did not do what it says; the text shows everything."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the tour takes place: a home of its own, a project in it, and a service on this machine."""

    home: Path
    port: int
    console: Console

    @property
    def project(self) -> Path:
        """The folder in which the commands are typed."""
        return self.home / "demo"

    @property
    def env(self) -> Mapping[str, str]:
        """The variables of every command: the stage's own home, and the caller's package caches."""
        own = {
            "HOME": str(self.home),
            "USER_SPACE": str(self.home / ".ai"),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
        }
        return {**os.environ, **caches(), **own, "PATH": search_path(), "NO_COLOR": "1"}

    def filled(self, text: str) -> str:
        """A text of the tour with the service's port in it."""
        return text.replace("PORT", str(self.port))

    def shown(self, text: str) -> str:
        """A text as a person at home would see it: their home is `~`, and what is long ends early."""
        home = text.replace(str(self.home), "~").strip("\n")
        lines = [line if len(line) <= WIDTH_SHOWN else f"{line[:WIDTH_SHOWN]}…" for line in home.splitlines()]
        more = [f"… {len(lines) - LINES_SHOWN} more lines"] if len(lines) > LINES_SHOWN + 1 else lines[LINES_SHOWN:]
        return "\n".join([*lines[:LINES_SHOWN], *more])


def search_path() -> str:
    """The PATH with this interpreter's folder first, as the make targets have it."""
    return os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", os.defpath)])


def caches() -> Mapping[str, str]:
    """The caller's own package caches and settings, which the stage's new home would hide."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    places = {
        "UV_CACHE_DIR": cache / "uv",
        "UV_CONFIG_FILE": config / "uv" / "uv.toml",
        "npm_config_cache": Path.home() / ".npm",
        "npm_config_userconfig": Path.home() / ".npmrc",
    }
    return {name: str(place) for name, place in places.items() if name not in os.environ and place.exists()}


class Service(BaseHTTPRequestHandler):
    """The service that the API tools of the tour speak to: cities, and a forecast that is always fine."""

    def do_GET(self) -> None:
        """Answer one request."""
        address = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(address.query).items()}
        if address.path == "/cities":
            found = [city for city in CITIES if city.lower().startswith(asked.get("name", "").lower())]
            self.answer({"cities": [{"name": city} for city in found]})
        else:
            city = address.path.rpartition("/")[2]
            self.answer({"city": city, "days": int(asked.get("days", "1")), "sky": "clear"})

    def do_POST(self) -> None:
        """Answer as a model does: the next turn of the directive that the thread runs."""
        request = as_object(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        messages = [as_object(one) for one in as_list(request["messages"])]
        names = [as_object(one) for message in messages for one in as_list(message.get("tool_calls"))]
        script, done = TURNS["spec" if "interview" in compact(messages[:2]) else "report"], 0
        for turn in script:
            if done == len(names):
                break
            done += len(turn)
        calls: list[Json] = [
            {
                "index": place,
                "id": f"call_{len(names) + place}",
                "type": "function",
                "function": {"name": name, "arguments": compact(arguments)}
                if name in {"ask", "return", "skill"}
                else {"name": "execute", "arguments": compact({"item_id": name, "parameters": arguments})},
            }
            for place, (name, arguments) in enumerate(turn.items())
        ]
        self.stream({"role": "assistant", "tool_calls": calls})

    def stream(self, delta: JsonObject) -> None:
        """Send a reply as server-sent events."""
        pieces: tuple[JsonObject, ...] = (
            {"choices": [{"index": 0, "delta": delta}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
            {"choices": [], "usage": {"prompt_tokens": 900, "completion_tokens": 60, "total_tokens": 960}},
        )
        body = "".join(f"data: {compact(piece)}\n\n" for piece in pieces)
        data = f"{body}data: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, value: Json) -> None:
        """Send one JSON value."""
        body = compact(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: the tour speaks."""


@contextmanager
def serving() -> Iterator[int]:
    """A service on a free port of 127.0.0.1, for as long as the block lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def walk(step: JsonObject, number: int, stage: Stage) -> None:
    """Take one step of the tour: say, write, type, call, and compare."""
    console = stage.console
    console.print(Rule(f"{number}. {as_text(step['title'])}", align="left", style="bold green"))
    console.print(as_text(step.get("says")), highlight=False)
    console.print()
    for name, text in as_object(step.get("writes")).items():
        write(stage, name, stage.filled(as_text(text)))
    for command in map(as_object, as_list(step.get("runs"))):
        type_in(stage, command)
    if calls := [as_object(call) for call in as_list(step.get("calls"))]:
        results = asyncio.run(asyncio.wait_for(call_all(stage, calls), CALL_LIMIT * (len(calls) + 1)))
        for call, result in zip(calls, results, strict=True):
            judge(call, result)


def write(stage: Stage, name: str, text: str) -> None:
    """Write a file of the project and show it."""
    path = stage.project / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    stage.console.print(Text(name, style="bold"))
    code = Syntax("", LEXERS[path.suffix], theme="ansi_dark", background_color="default")
    stage.console.print(code.highlight(textwrap.indent(text, "  ")), soft_wrap=True)


def type_in(stage: Stage, command: JsonObject) -> None:
    """Type one command to a shell, show what it says, and hold it against what it must say."""
    line = stage.filled(as_text(command["type"]))
    stage.console.print(Text(f"$ {line}", style="bold cyan"))
    code, said = shell(line, stage)
    if said.strip():
        stage.console.print(Text(stage.shown(said)), soft_wrap=True)
    stage.console.print()
    expected = cast("int", command.get("exits", 0))
    compare(f"$ {line}", said, command, fault="" if code == expected else f"exit code {code}, not {expected}")


def shell(line: str, stage: Stage) -> tuple[int, str]:
    """Run one line of bash and return its exit code and all it said; nothing of it outlives the line."""
    with subprocess.Popen(
        ["bash", "-c", line], cwd=stage.project, env=stage.env, start_new_session=True, text=True, encoding="utf-8",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=COMMAND_LIMIT)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                heard = (error.stdout or b"").decode(errors="replace")
                raise Surprise(f"$ {line}\n{heard}\n✗ still ran after {COMMAND_LIMIT:.0f} seconds") from None
            raise
    return process.returncode, said


async def call_all(stage: Stage, calls: Sequence[JsonObject]) -> list[CallToolResult]:
    """Make calls with the official MCP client, over the standard input and output of `kiwi serve`, and show them."""
    entry = StdioServerParameters(
        command="kiwi", args=["serve", "--project", str(stage.project)], env=dict(stage.env), cwd=stage.project
    )
    async with Client(entry, read_timeout_seconds=CALL_LIMIT) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        stage.console.print(Text(f"← tools: {', '.join(names)} (protocol {client.protocol_version})\n"))
        results = []
        for call in calls:
            stage.console.print(Text(asked(call), style="bold cyan"), soft_wrap=True)
            result = await client.call_tool(as_text(call["tool"]), dict(as_object(call["arguments"])))
            stage.console.print(Text(f"← {stage.shown(told(result))}\n"), soft_wrap=True)
            results.append(result)
        return results


def asked(call: JsonObject) -> str:
    """A call as the tour shows it."""
    return f"→ {as_text(call['tool'])} {json.dumps(call['arguments'], ensure_ascii=False)}"


def told(result: CallToolResult) -> str:
    """What the model reads of a result."""
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))


def judge(call: JsonObject, result: CallToolResult) -> None:
    """Hold a result, in words and as data, against what it must show."""
    is_refused = bool(result.is_error)
    fault = "" if is_refused == bool(call.get("fails")) else f"is_error is {is_refused}"
    compare(asked(call), f"{told(result)}\n{compact(result.structured_content)}", call, fault=fault)


def compare(done: str, said: str, wanted: JsonObject, *, fault: str) -> None:
    """Raise with everything that was said, unless it says what the tour promises."""
    faults = [fault] if fault else []
    faults += [f"does not show {text!r}" for text in map(str, as_list(wanted.get("shows"))) if text not in said]
    faults += [f"shows {text!r}" for text in map(str, as_list(wanted.get("hides"))) if text in said]
    if faults:
        raise Surprise(f"{done}\n{said}\n" + "\n".join(f"✗ {one}" for one in faults))


def take(steps: Sequence[JsonObject], stage: Stage) -> int:
    """Take every step; at the first surprise say which one it was, and show everything."""
    started = time.monotonic()
    for number, step in enumerate(steps, 1):
        try:
            walk(step, number, stage)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the tour says in which step, and shows it
            stage.console.print(Text(f"✗ Step {number} did not do what it says: {step['title']}", style="bold red"))
            shown = str(error) if isinstance(error, Surprise) else traceback.format_exc()
            stage.console.print(Text(shown), soft_wrap=True)
            return 1
    took = time.monotonic() - started
    stage.console.print(Text(f"✓ {len(steps)} steps did what they say, in {took:.0f} s.", style="bold green"))
    stage.console.print("Now yours: README.md, docs/guides/your-first-tool.md, `kiwi help`.", highlight=False)
    return 0


def main() -> int:
    """Take the tour from nothing, in folders that are gone afterwards."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    missing = [name for name in NEEDED if shutil.which(name, path=search_path()) is None]
    for name in missing:
        print(f"demo: `{name}` is not on this machine's PATH.\nhint: {NEEDED[name]}", file=sys.stderr)
    if missing:
        return 1
    steps = [as_object(step) for step in as_list(read_yaml(TOUR.read_text(encoding="utf-8"), what=TOUR.name).value)]
    with tempfile.TemporaryDirectory(prefix="kiwi-demo-", ignore_cleanup_errors=True) as home, serving() as port:
        stage = Stage(Path(home).resolve(), port, console)
        stage.project.mkdir()
        return take(steps, stage)


if __name__ == "__main__":
    sys.exit(main())
