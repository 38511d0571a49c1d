"""Twenty tasks of ten calls over five MCP servers: call by call, and as one program, through Kiwi and through FastMCP.

The model is scripted: it finds the tools it needs, reads their parameters, makes the calls or sends the program, and
ends. What it reads at each request is counted: instructions, definitions, the task and all messages before. Of a
result that is the structured content where there is one, and the text otherwise. Its own time is not in the figures.

Usage: code_tasks.py
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from context import Tell, talking
from kiwi_mcp.domain.json import Json, compact
from kiwi_mcp.domain.token_cost import cost_of
from peers import KIWI, PEERS, Place

SERVERS = Path(sys.prefix) / "mcp-servers"
_FASTMCP = str(Path(__file__).with_name("fastmcp_code.py"))
_NODE = SERVERS / "npm" / "node_modules" / "@modelcontextprotocol"
_SECONDS = 600.0
_FEW = ", execute: false, help: false"
_CALL_TOOL = 'call_tool("{server}_{tool}", {{{words}}})'
_ZONES = (
    '["Asia/Tokyo", "Europe/Paris", "America/New_York", "Asia/Kolkata", "Africa/Cairo", "Australia/Perth", '
    '"America/Lima", "Asia/Dubai", "Pacific/Honolulu", "Atlantic/Reykjavik"][n]'
)


class Calls(Struct, frozen=True):
    """Some calls of one tool: its arguments are Python expressions in which `n` counts them."""

    server: str
    tool: str
    count: int
    arguments: Mapping[str, str]


class Task(Struct, frozen=True):
    """What is asked, how the tools for it are looked for, ten calls, and the answer from the texts `t` of `texts`."""

    question: str
    calls: tuple[Calls, ...]
    answer: str


def _reads(file: str, count: int = 10) -> Calls:
    return Calls("filesystem", "read_text_file", count, {"path": f'f"{{root}}/{file}"'})


def _shows(count: int = 10) -> Calls:
    return Calls("git", "git_show", count, {"repo_path": '"{root}"', "revision": 'f"v{n}"'})


def _nodes(count: int = 10) -> Calls:
    return Calls("memory", "open_nodes", count, {"names": '[f"project-{n}"]'})


def _times(count: int = 10, time_: str = '"09:00"', zone: str = _ZONES) -> Calls:
    arguments = {"source_timezone": '"UTC"', "time": time_, "target_timezone": zone}
    return Calls("time", "convert_time", count, arguments)


def _sums(expression: str, count: int = 10) -> Calls:
    return Calls("calculator", "calculate", count, {"expression": expression})


def _count(pattern: str) -> str:
    return f'sum(len(re.findall(r"{pattern}", t)) for t in texts)'


def _total(pattern: str) -> str:
    return f'sum(float(one) for t in texts for one in re.findall(r"{pattern}", t))'


def _in_root(server: str, tool: str, **more: str) -> Calls:
    return Calls(server, tool, 10, {name: text.replace("ROOT", "{root}") for name, text in more.items()})


_ORDERS, _NOTES = _reads("orders-{n}.csv"), _reads("note-{n}.md", 5)
_INFO = _in_root("filesystem", "get_file_info", path='f"ROOT/note-{n}.md"')
_BOXES = _in_root("filesystem", "list_directory", path='f"ROOT/box-{n}"')
_DIFFS = _in_root("git", "git_diff", repo_path='"ROOT"', target='f"v{n}"')
_LOGS = _in_root("git", "git_show", repo_path='"ROOT"', revision='f"v{n}:log.txt"')
_LEADS = _in_root("memory", "search_nodes", query='f"person-{n}."')
_HOURS = _times(10, 'f"{n + 8:02}:00"', '"Asia/Tokyo"')
_BILLS, _SQUARES = _sums('f"{n + 1} * 100 * 1.19"', 5), _sums('f"({n} + 1) ** 2"')
_SAVINGS = _sums('f"1000 * 105 ** {n} // 100 ** {n}"')
_FIRST = (_reads("orders-{n}.csv", 4), _shows(3), _nodes(3))
_FIVE = (_reads("note-{n}.md", 2), _shows(2), _nodes(2), _times(2), _sums('f"{n} + 40"', 2))
_AT = r"target.{1,60}?T"
TASKS = (
    Task("How many orders in the files orders-0.csv to orders-9.csv are open?", (_ORDERS,), _count(",open,")),
    Task("What do the paid orders of all order files come to?", (_ORDERS,), _total(r",paid,(\d+)")),
    Task("How many bytes have the ten notes?", (_INFO,), _total(r"size: (\d+)")),
    Task("How many files are in the folders box-0 to box-9?", (_BOXES,), _count(r"\[FILE\]")),
    Task("How many of the versions v0 to v9 were committed by Ann?", (_shows(),), _count("Author: .?Ann")),
    Task("How many lines did the commits v0 to v9 add?", (_shows(),), _count(r"\+added")),
    Task("By how many lines does the log of today differ from v0 to v9?", (_DIFFS,), _count(r"\+added")),
    Task("How many lines had log.txt in v0 to v9, in all?", (_LOGS,), _count("added")),
    Task("How many of the projects 0 to 9 in the memory are blocked?", (_nodes(),), _count("is blocked")),
    Task("How many projects do the persons 0 to 9 lead?", (_LEADS,), _count("led by person-")),
    Task("How many hours were booked on the projects 0 to 9?", (_nodes(),), _total(r"hours: (\d+)")),
    Task("How many of five projects are blocked or urgent?", (_nodes(5), _NOTES), _count("is blocked|urgent")),
    Task("At nine in UTC, in which of ten cities is it afternoon?", (_times(),), _count(_AT + r"(?:1[2-9]|2\d):")),
    Task("Which of ten hours in UTC are working hours in Tokyo?", (_HOURS,), _count(_AT + "(?:09|1[0-7]):")),
    Task("How many hours are ten cities ahead of UTC, added up?", (_times(),), _total(r"([+-][\d.]+)h")),
    Task("How many of five cities are ahead, and five bills above 99?", (_times(5), _BILLS), _count(r"\+\d|\d\d\d\.?")),
    Task("What do the squares of 1 to 10 come to?", (_SQUARES,), _total(r"(\d+)")),
    Task("What do savings at 5 % after 0 to 9 years come to?", (_SAVINGS,), _total(r"(\d+)")),
    Task("Count open orders, commits by Ann and blocked projects.", _FIRST, _count(",open,|Author: .?Ann|is blocked")),
    Task("Count what two calls of every server show.", _FIVE, _count(r"urgent|\+added|is blocked|\+[\d.]+h|4\d")),
)


class Transcript(Struct):
    """A conversation with a model: what it read at each request, what it wrote, and the milliseconds of its calls."""

    fixed: int
    requests: int = 0
    read: int = 0
    written: int = 0
    ms: float = 0.0
    _before: int = 0

    def answer(self, text: str) -> None:
        """Let the model read all that there is, and answer with a text."""
        self.requests += 1
        self.read += self.fixed + self._before
        cost = cost_of(text).tokens
        self.written += cost
        self._before += cost

    def add(self, text: str) -> None:
        """Add a text that the model reads from now on."""
        self._before += cost_of(text).tokens


class Session(Struct, frozen=True):
    """A server that is asked: where the data is, how it is asked, and the tokens of what it always sends."""

    root: str
    tell: Tell
    fixed: int


class Row(Struct, frozen=True):
    """What one way to do a task took."""

    way: str
    requests: int
    read: int
    written: int
    ms: float


def _fill(folder: Path) -> None:
    """Make the files, commits and projects that the tasks ask about."""
    for n in range(10):
        rows = [f"{n}{row:02},{'open' if (row + n) % 3 else 'paid'},{row * 7 + n}" for row in range(40)]
        (folder / f"orders-{n}.csv").write_text("id,state,total\n" + "\n".join(rows) + "\n")
        (folder / f"note-{n}.md").write_text(
            f"# Note {n}\n" + "Something that was said.\n" * (n + 3) + "urgent\n" * (n % 2)
        )
        (folder / f"box-{n}").mkdir()
        for number in range(n % 4 + 1):
            (folder / f"box-{n}" / f"part-{number}.txt").write_text("x\n")
    person = "led by person-{}."
    nodes = [
        {"type": "entity", "name": f"project-{n}", "entityType": "project", "observations": [
            person.format(n // 2), f"hours: {n * 11 + 5}", "is blocked" if n % 3 == 0 else "goes well", "It has a plan."
        ]} for n in range(10)
    ]  # fmt: skip
    (folder / "memory.jsonl").write_text("\n".join(map(json.dumps, nodes)) + "\n")
    git = ["git", "-C", str(folder), "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True, timeout=60)
    for n in range(11):
        (folder / "log.txt").write_text("".join(f"added line {line} in the log\n" for line in range((n + 1) * 3)))
        subprocess.run([*git, "add", "log.txt"], check=True, timeout=60)
        who = ["-c", f"user.name={'Ann' if n % 2 else 'Bob'}", "-c", "user.email=who@example.org"]
        subprocess.run([*git, *who, "commit", "-q", "-m", f"Change {n}"], check=True, timeout=60)
        subprocess.run([*git, "tag", f"v{n}"], check=True, timeout=60)


def _servers(root: Path) -> Mapping[str, tuple[str, ...]]:
    python = {
        name: str(SERVERS / f"mcp-server-{name}" / "bin" / f"mcp-server-{name}")
        for name in ("git", "time", "calculator")
    }
    return {
        "filesystem": ("node", str(_NODE / "server-filesystem/dist/index.js"), str(root)),
        "memory": ("node", str(_NODE / "server-memory/dist/index.js")),
        "git": (python["git"], "--repository", str(root)),
        "time": (python["time"], "--local-timezone", "UTC"),
        "calculator": (python["calculator"],),
    }


def _prepare(place: Place, root: Path, sent: str) -> tuple[str, ...]:
    """Let Kiwi know the servers and permit their calls; return the command that serves them, with tools always sent."""
    (place.project / ".ai").mkdir(parents=True)
    for name, command in _servers(root).items():
        granted = ["--write", str(root)] if name in {"filesystem", "memory", "git"} else []
        env = ["--env", f"MEMORY_FILE_PATH={root}/memory.jsonl"] if name == "memory" else []
        added = [KIWI, "mcp", "add", name, *granted, *env, "--", *command]
        subprocess.run(added, cwd=place.project, env=place.environment, capture_output=True, check=True, timeout=120)
    ruled = [KIWI, "approvals", "rules", "add", "mcp/*"]
    subprocess.run(ruled, cwd=place.project, env=place.environment, capture_output=True, check=True, timeout=120)
    user = Path(place.environment["USER_SPACE"])
    (user / "preferences.yaml").write_text(f"always_send: {{builtin/kiwi/code: {{as: code}}{sent}}}\n")
    return KIWI, "serve", "--project", str(place.project)


def _config(place: Place, root: Path) -> str:
    servers: dict[str, Json] = {
        name: {"command": command[0], "args": [*command[1:]], "env": {"MEMORY_FILE_PATH": f"{root}/memory.jsonl"}}
        for name, command in _servers(root).items()
    }
    path = place.folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return str(path)


def _content(answer: Mapping[str, Any]) -> str:
    """Return what a model is shown of a result."""
    shown = answer.get("structuredContent")
    return compact(shown) if shown is not None else "\n".join(str(one.get("text")) for one in answer["content"])


def _source(task: Task, root: str, call: str) -> str:
    """Return the program of a task; `call` says how a tool is called."""
    lines = ["import asyncio", "import re", "texts = []"]
    for one in task.calls:
        arguments = {name: _inlined(expression, root) for name, expression in one.arguments.items()}
        made = call.format(
            server=one.server,
            tool=one.tool,
            keywords=", ".join(f"{name}={expression}" for name, expression in arguments.items()),
            words=", ".join(f'"{name}": {expression}' for name, expression in arguments.items()),
        )
        lines.append(f"texts += [str(one) for one in await asyncio.gather(*[{made} for n in range({one.count})])]")
    return "\n".join(lines)


def _inlined(expression: str, root: str) -> str:
    return expression.replace("{root}", root)


def _evaluated(task: Task, texts: Sequence[str]) -> float:
    return float(eval(task.answer, {"re": re, "texts": texts}))


def _singles(task: Task, root: str) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yield the server, the tool and the arguments of each call."""
    for one in task.calls:
        for n in range(one.count):
            made = {name: eval(_inlined(text, root), {"n": n}) for name, text in one.arguments.items()}
            yield one.server, one.tool, made


def _ask(transcript: Transcript, tell: Tell, name: str, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Let the model call a tool and read the result."""
    transcript.answer(json.dumps({"name": name, "arguments": {**arguments}}, separators=(",", ":")))
    began = time.perf_counter()
    answer = tell(name, {**arguments})
    transcript.ms += (time.perf_counter() - began) * 1_000
    transcript.add(_content(answer))
    return answer


def _number(answer: Mapping[str, Any]) -> float:
    return float(re.findall(r"-?[\d.]+", _content(answer))[0])


def _tools(task: Task) -> Sequence[tuple[str, str]]:
    return [*dict.fromkeys((one.server, one.tool) for one in task.calls)]


def _executes(session: Session, task: Task) -> tuple[Transcript, float]:
    transcript = _looked_up(session, task)
    calls = ({"item_id": f"{server}/{tool}", "parameters": made} for server, tool, made in _singles(task, session.root))
    results = [_ask(transcript, session.tell, "execute", one)["structuredContent"]["result"] for one in calls]
    return _answered(transcript, _evaluated(task, [*map(str, results)]))


def _program(session: Session, task: Task) -> tuple[Transcript, float]:
    transcript = _looked_up(session, task)
    code = f"{_source(task, session.root, 'tools.{server}.{tool}({keywords})')}\n{task.answer}"
    return _answered(transcript, _number(_ask(transcript, session.tell, "code", {"code": code})))


def _looked_up(session: Session, task: Task) -> Transcript:
    """Let a model find the tools through Kiwi and read their parameters."""
    transcript = Transcript(session.fixed)
    transcript.add(task.question)
    for server, tool in _tools(task):
        found = _ask(transcript, session.tell, "search", {"query": f"{server} {tool.replace('_', ' ')}", "limit": 3})
        if f"mcp/{server}/{tool}@" not in _content(found):
            raise RuntimeError(f"Kiwi does not find {server}/{tool}: {_content(found)}")
    for server, tool in _tools(task):
        _ask(transcript, session.tell, "load", {"item_id": f"{server}/{tool}"})
    return transcript


def _calls(session: Session, task: Task) -> tuple[Transcript, float]:
    transcript = Transcript(session.fixed)
    transcript.add(task.question)
    calls = ((f"{server}_{tool}", made) for server, tool, made in _singles(task, session.root))
    results = [_ask(transcript, session.tell, name, made) for name, made in calls]
    texts = [str(one.get("structuredContent") or one["content"][0]["text"]) for one in results]
    return _answered(transcript, _evaluated(task, texts))


def _peer_program(session: Session, task: Task) -> tuple[Transcript, float]:
    transcript, names = Transcript(session.fixed), [f"{server}_{tool}" for server, tool in _tools(task)]
    transcript.add(task.question)
    for name in names:
        found = _ask(transcript, session.tell, "search", {"query": name.replace("_", " "), "limit": 3})
        if name not in _content(found):
            raise RuntimeError(f"FastMCP does not find {name}: {_content(found)}")
    _ask(transcript, session.tell, "get_schema", {"tools": names})
    code = f"{_source(task, session.root, _CALL_TOOL)}\nreturn {task.answer}"
    return _answered(transcript, _number(_ask(transcript, session.tell, "execute", {"code": code})))


def _answered(transcript: Transcript, answer: float) -> tuple[Transcript, float]:
    transcript.answer(f"{answer:g}")
    return transcript, answer


def measure() -> list[list[Row]]:
    """Return for each task what each way took."""
    if not (PEERS / ".stamp").exists() or not (SERVERS / ".stamp").exists():
        raise SystemExit("The servers or FastMCP are missing: run scripts/setup.sh --bench")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        root, places = Path(name) / "data", [Place(Path(name, part), "") for part in ("all", "few")]
        root.mkdir()
        _fill(root)
        kiwi = [_prepare(place, root, sent) for place, sent in zip(places, ("", _FEW), strict=True)]
        peer = (str(PEERS / "fastmcp" / "bin" / "python"), _FASTMCP, _config(places[0], root))

        def opened(command: Sequence[str], place: Place) -> Session:
            greeting, listed, tell = stack.enter_context(talking(command, place.environment, seconds=_SECONDS))
            texts = [str(greeting.get("instructions") or ""), *map(_definition, listed["tools"])]
            return Session(str(root), tell, sum(cost_of(text).tokens for text in texts))

        ours = opened(kiwi[0], places[0])
        ways: Mapping[str, Callable[[Task], tuple[Transcript, float]]] = {
            "FastMCP, every tool sent, ten calls": partial(_calls, opened(peer, places[0])),
            "FastMCP's code mode, one program": partial(_peer_program, opened((*peer, "code"), places[0])),
            "Kiwi, ten calls": partial(_executes, ours),
            "Kiwi's code mode, one program": partial(_program, ours),
            "Kiwi's code mode, only `search`, `load` and `code` sent": partial(_program, opened(kiwi[1], places[1])),
        }
        for do in ways.values():  # warm-up: it starts the servers
            do(TASKS[-1])
        return [_rows(task, ways) for task in TASKS]


def _rows(task: Task, ways: Mapping[str, Callable[[Task], tuple[Transcript, float]]]) -> list[Row]:
    done = {name: do(task) for name, do in ways.items()}
    answers = [answer for _, answer in done.values()]
    if len({round(answer, 6) for answer in answers}) != 1 or not answers[0]:
        raise RuntimeError(f"{task.question} {answers}")
    return [
        Row(name, transcript.requests, transcript.read, transcript.written, transcript.ms)
        for name, (transcript, _) in done.items()
    ]


def _definition(tool: Mapping[str, Json]) -> str:
    return compact({key: tool[key] for key in ("name", "description", "inputSchema")})


def table(tasks: Sequence[Sequence[Row]]) -> str:
    """Return the means of all tasks as a table, and how many times fewer tokens a program takes."""
    lines = [
        "| way | requests to the model | tokens it reads | tokens it writes | ms without the model |",
        "|---|---:|---:|---:|---:|",
    ]
    for rows in zip(*tasks, strict=True):
        means = [
            statistics.mean(numbers)
            for numbers in zip(*((row.requests, row.read, row.written, row.ms) for row in rows), strict=True)
        ]
        lines.append(f"| {rows[0].way} | {means[0]:.1f} | {means[1]:,.0f} | {means[2]:,.0f} | {means[3]:,.0f} |")
    ratios = [[rows[one].read / rows[other].read for rows in tasks] for one, other in ((2, 3), (0, 1), (3, 1), (4, 1))]
    about = (
        "Tokens read, ten calls ÷ one program: Kiwi {}, FastMCP {}.\nKiwi's program ÷ FastMCP's: {}, and {} with few "
        f"tools sent.\nMeans, with the smallest and the largest of {len(tasks)} tasks. All ways gave the same answers."
    )
    return "\n".join([*lines, "", about.format(*map(_spread, ratios)), ""])


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.mean(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"


if __name__ == "__main__":
    print(table(measure()))
