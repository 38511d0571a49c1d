"""README and guides are executed: each command must print what the page shows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from pathlib import Path

import pytest
import yaml
from mcp import Client, StdioServerParameters
from mcp_types import ElicitResult
from tests.plugins.scripted_model import MODEL, ScriptedModel, use

from kiwi_mcp.surfaces import start
from kiwi_mcp.surfaces.cli.help import table

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]

FENCE = re.compile(r"^`{3,4}(\w+)(?: (\S+))?\n(.*?)^`{3,4}$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^````(\w+)(?: (\S+))?\n(.*?)^````$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"^<!-- model\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
LOCAL_MODEL = "127.0.0.1:11434", "qwen3"
"""The address and the model that pages show; the tests put a scripted model there."""
LINK = re.compile(r"\]\((?!\w+:)([^)#]+)")
SPOKEN = re.compile(r"`kiwi (\w+)")
FAILS = re.compile(r"^error: |: \d+ issues?$", re.MULTILINE)
PROGRESS = re.compile(r"^… .*\n", re.MULTILINE)
VARYING = {
    r"\b\d+ ms\b": "0 ms",
    r"\boutput_[\d_]+\.json": "output.json",
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ": "TIME",
}
SHELL_MARKS = {"&&", "||", "|", ";", ">", ">>", "<"}


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page: its language, the file it is to be saved as if any, and its text."""

    language: str
    path: str
    text: str

    @property
    def is_request(self) -> bool:
        return self.language == "json" and "tool" in json.loads(self.text)


async def agree(context: object, params: object) -> ElicitResult:
    return ElicitResult(action="accept", content={"approve": True})


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader who follows a page, in a separate project."""

    project: Path
    monkeypatch: pytest.MonkeyPatch

    def type_in(self, line: str) -> tuple[int, str]:
        """Type one line and return its exit code and all it says."""
        words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
        match words:
            case ["make", *targets]:
                return self.run(["make", "--dry-run", *targets], ROOT)
            case ["uv", "tool", "install", *_]:  # what it would do, without an index
                words = ["uv", "pip", "install", "--dry-run", "--no-deps", "--no-build-isolation", "--offline", "."]
                return self.run(words, ROOT)
            case ["kiwi", *_] if not SHELL_MARKS & {*words}:
                return self.kiwi(shlex.split(line)[1:])
            case _:
                return self.run(["bash", "-c", line], self.project)

    def kiwi(self, words: Sequence[str]) -> tuple[int, str]:
        """Run the command line in this process, where its imports are paid for once."""
        self.monkeypatch.setattr(sys, "argv", ["kiwi", *words])
        said, code = StringIO(), 0
        with redirect_stdout(said), redirect_stderr(said):
            try:
                start.main()
            except SystemExit as end:
                code = int(end.code or 0)
        return code, said.getvalue()

    def run(self, argv: Sequence[str], folder: Path) -> tuple[int, str]:
        done = subprocess.run(
            argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout

    def ask(self, requests: Sequence[str]) -> list[tuple[bool, str]]:
        """Send requests as an MCP client does, and return for each whether it failed and the reply."""

        async def session() -> list[tuple[bool, str]]:
            server = StdioServerParameters(command="kiwi", args=["serve"], env=dict(os.environ), cwd=self.project)
            # What a model wrote is shown to the reader before it first runs, who agrees.
            asking = Client(server, read_timeout_seconds=120, elicitation_callback=agree)
            async with asyncio.timeout(120), asking as client:
                assert {tool.name for tool in (await client.list_tools()).tools} == {
                    "search", "load", "execute", "help",
                }  # fmt: skip
                replies = []
                for text in requests:
                    request = json.loads(text.replace("/absolute/path/to/project", str(self.project)))
                    result = await client.call_tool(request["tool"], request["arguments"])
                    replies.append((result.is_error, str(result.content)))
                return replies

        return asyncio.run(session())


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order; one in four backticks may hold others."""
    text = page.read_text(encoding="utf-8")
    quoted = {found.start(): Block(*found.groups()) for found in QUOTED.finditer(text)}
    rest = QUOTED.sub(lambda found: " " * len(found[0]), text)
    plain = {found.start(): Block(*found.groups()) for found in FENCE.finditer(rest)}
    return [block for _, block in sorted({**quoted, **plain}.items())]


def play(page: Path, model: ScriptedModel) -> None:
    """Let the model of a page's reader do what the page says in a comment."""
    for found in SCRIPT.findall(page.read_text(encoding="utf-8")):
        model.will(*(use(turn["call"], **turn["arguments"]) for turn in yaml.safe_load(found)))


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and what the page shows below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        yield line, shown


def pattern(shown: str) -> str:
    """What the page shows as an expression: `…` stands for anything, and on a line of its own for any lines."""
    lines = [
        r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in steady(shown).splitlines()
    ]
    return "".join(lines)


def steady(text: str) -> str:
    """A text with what differs from run to run made equal."""
    for varying, same in VARYING.items():
        text = re.sub(varying, same, text)
    return text


def follow(reader: Reader, text: str) -> None:
    for line, shown in commands(text):
        code, said = reader.type_in(line)
        assert (code != 0) == bool(FAILS.search(shown)), f"$ {line}\n{said}"
        if shown.strip():
            heard = steady(PROGRESS.sub("", said))
            assert re.fullmatch(pattern(shown), heard), f"$ {line}\n--- shown\n{shown}--- said\n{said}"


@pytest.fixture
def reader(tmp_path: Path, kiwi: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    project = tmp_path / "empty"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.delenv("KIWI_SEARCH")  # a reader has all that Kiwi has
    return Reader(project, monkeypatch)


@pytest.mark.usefixtures("encoder_model", "sandbox")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_following_a_page_gives_the_output_that_it_shows(
    page: Path, reader: Reader, home: Path, scripted_model: ScriptedModel
) -> None:
    play(page, scripted_model)
    for is_request, group in groupby(blocks(page), key=lambda block: block.is_request):
        if is_request:
            replies = reader.ask([block.text for block in group])
            assert [reply for is_error, reply in replies if is_error] == []
            continue
        for block in group:
            if block.path:
                path = home / block.path[2:] if block.path.startswith("~/") else reader.project / block.path
                path.parent.mkdir(parents=True, exist_ok=True)
                text = block.text.replace(LOCAL_MODEL[0], scripted_model.host).replace(LOCAL_MODEL[1], MODEL)
                path.write_text(text, encoding="utf-8")
            elif block.language == "console":
                follow(reader, block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_executed_or_a_server_entry_or_plain_text(page: Path) -> None:
    for block in blocks(page):
        match block.language:
            case "console" | "text":
                assert not block.path
            case "json" if not (block.is_request or block.path):
                (entry,) = json.loads(block.text)["mcpServers"].values()
                words = entry["args"][1:] if entry["args"][0] == "memory" else entry["args"]
                assert start.named_project(words[1:]) is not None
                assert (Path(entry["command"]).name, words[0]) == ("kiwi", "serve")
            case "yaml":
                assert yaml.safe_load(block.text)
            case "json":
                pass
            case _:
                assert block.path, block.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere_and_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []
    known = {name.split()[0] for row in table()["commands"] for name in (row["path"], *row["aliases"])}
    assert sorted({*SPOKEN.findall(text)} - known) == []


@pytest.mark.parametrize(
    ("shown", "said", "matches"),
    [
        ("Hello\n", "Hello\n", True),
        ("Hello\n", "Hello, Ada\n", False),
        ("Hello\n", "Hello\nAda\n", False),
        ("a … c\n", "a b c\n", True),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nb\nc\n", False),
        ("done in 3 ms\n", "done in 44 ms\n", True),
    ],
)
def test_a_page_is_compared_line_by_line(shown: str, said: str, matches: bool) -> None:
    assert bool(re.fullmatch(pattern(shown), steady(said))) == matches
