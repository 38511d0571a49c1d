"""What a conversation costs a model that finds, loads and calls a tool, against one that is sent every definition.

Usage: context.py. The words are those that went over the pipes; the tokens are Kiwi's own estimate of them.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiwi_mcp.domain.json import as_list, as_object, as_text, compact
from kiwi_mcp.domain.token_cost import TokenCost, cost_of, total
from labelled import OWN, Listed, padded, read_tools
from peers import KIWI, STARTED, Place
from starts import HANDSHAKE

KNOWN = (10, 1_000, 10_000)
SECTION = "Token cost of a conversation"
ABOUT = """\
A model that finds, loads and calls a tool through Kiwi, with all that it is told and says for that, against one that is
sent every definition and calls the tool. Tokens, as Kiwi estimates them within a tenth, and bytes in brackets. Budget:
Kiwi's own definitions under 900 tokens, and the whole the same at every size."""
_NEEDS = (
    "read a text file",
    "list everything in a directory",
    "rename a file",
    "find lines that match a regular expression",
    "show the commits of a branch",
)
_PATIENCE = 180
Tell = Callable[[str, dict[str, object]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """What is paid for among so many tools: every definition and the call, or Kiwi's own and the way to the call."""

    known: int
    every: TokenCost
    own: TokenCost
    search: TokenCost
    load: TokenCost
    call: TokenCost

    @property
    def direct(self) -> TokenCost:
        """The whole conversation, where every definition is sent."""
        return total([self.every, self.call])

    @property
    def found(self) -> TokenCost:
        """The whole conversation through Kiwi."""
        return total([self.own, self.search, self.load, self.call])


def measure() -> list[Row]:
    """Return a row for each number of tools."""
    with tempfile.TemporaryDirectory() as folder:
        return [_measured(Path(folder, str(count)), count) for count in KNOWN]


def table(rows: Sequence[Row]) -> str:
    """Return the section of the page."""
    lines = [f"## {SECTION}", "", ABOUT, ""]
    parts = ("every definition", "Kiwi's own", "search", "load", "call", "all, every one sent", "all, through Kiwi")
    lines += [f"| tools | {' | '.join(parts)} | ratio |", "|---" * (len(parts) + 2) + "|"]
    for row in rows:
        costs = (row.every, row.own, row.search, row.load, row.call, row.direct, row.found)
        ratio = row.direct.tokens / row.found.tokens
        lines.append(f"| {row.known:,} | {' | '.join(map(_told, costs))} | {ratio:,.1f} |")
    return "\n".join(lines) + "\n"


def _told(cost: TokenCost) -> str:
    return f"{cost.tokens:,} ({cost.bytes:,})"


def _measured(folder: Path, count: int) -> Row:
    tools = _definitions(count)
    place = Place(folder, "")
    (place.project / ".ai").mkdir(parents=True)
    listing = folder / "listing.json"
    listing.write_text(json.dumps(tools), encoding="utf-8")
    added = [KIWI, "mcp", "add", "many", "--", *STARTED, "--listing", str(listing)]
    subprocess.run(added, cwd=place.project, env=place.environment, capture_output=True, check=True, timeout=_PATIENCE)
    with talking([KIWI, "serve", "--project", str(place.project)], place.environment) as (greeting, listed, tell):
        _wait_for_words(tell)
        turns = [_dialogue(tell, need) for need in _NEEDS]
    search, load, call = (_mean(costs) for costs in zip(*turns, strict=True))
    own = total([cost_of(as_text(greeting.get("instructions"))), *map(_defined, as_list(listed.get("tools")))])
    return Row(count, total(map(_defined, tools)), own, search, load, call)


def _definitions(count: int) -> list[dict[str, object]]:
    """Return so many tools as a server lists them, each under a name of its own."""
    made: dict[str, dict[str, object]] = {}
    for tool in padded(read_tools(OWN / "corpus" / "tools.jsonl"), count):
        name = tool.name if tool.name not in made else f"{tool.name}_{len(made)}"
        made[name] = _definition(name, tool)
    return [*made.values()]


def _definition(name: str, tool: Listed) -> dict[str, object]:
    taken = {word: {"type": "string", "description": text} for word, text in tool.parameters.items()}
    return {
        "name": name,
        "description": tool.description,
        "inputSchema": {"type": "object", "properties": taken, "required": [*taken][:1]},
        "annotations": {"readOnlyHint": True},  # so that nobody is asked before it is called
    }


def _defined(tool: object) -> TokenCost:
    response = as_object(json.loads(json.dumps(tool)))
    return cost_of(compact({word: response[word] for word in ("name", "description", "inputSchema")}))


def _wait_for_words(tell: Tell) -> None:
    """Wait until every tool can be found by its words."""
    until = time.monotonic() + _PATIENCE
    while left := tell("search", {"query": _NEEDS[0]})["structuredContent"].get("indexing"):
        if left["words"] == left["cards"]:
            return
        if time.monotonic() > until:
            raise TimeoutError(left)
        time.sleep(0.2)


def _dialogue(tell: Tell, need: str) -> tuple[TokenCost, TokenCost, TokenCost]:
    """Find a tool, load it and call it, as a model does that takes the first one; return what each step costs."""
    searched: dict[str, object] = {"query": need}
    found = tell("search", searched)
    (first, *_) = found["structuredContent"]["results"]
    loaded: dict[str, object] = {"item_id": first["identity"]}
    definition = tell("load", loaded)
    (word, *_) = definition["structuredContent"]["parameters"]["properties"]
    called: dict[str, object] = {**loaded, "parameters": {word: "A short answer, as tools give them."}}
    steps = (("search", searched, found), ("load", loaded, definition), ("execute", called, tell("execute", called)))
    search, load, call = (_step(name, said, answer) for name, said, answer in steps)
    return search, load, call


def _step(name: str, said: dict[str, object], answer: dict[str, Any]) -> TokenCost:
    """Return what a model says and reads for one call, by what Kiwi tells of its answer."""
    return total([cost_of(json.dumps({"name": name, "arguments": said})), TokenCost(**answer["_meta"]["kiwi/context"])])


def _mean(costs: Sequence[TokenCost]) -> TokenCost:
    whole = total(costs)
    return TokenCost(round(whole.bytes / len(costs)), round(whole.tokens / len(costs)))


@contextmanager
def talking(
    command: Sequence[str], environment: Mapping[str, str], *, seconds: float = _PATIENCE
) -> Iterator[tuple[dict[str, Any], dict[str, Any], Tell]]:
    """Give a server's greeting and its list of tools, and the way to call one; it is stopped after some seconds."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said, heard = process.stdin, process.stdout

        def ask(message: dict[str, object]) -> dict[str, Any]:
            said.write(json.dumps(message) + "\n")
            said.flush()
            for line in heard if "id" in message else ():
                answer = json.loads(line)
                if answer.get("id") == message["id"]:  # what is said between is no answer
                    return dict(answer["result"])
            return {}

        def tell(name: str, arguments: dict[str, object]) -> dict[str, Any]:
            params: dict[str, object] = {"name": name, "arguments": arguments}
            result = ask({"jsonrpc": "2.0", "id": name, "method": "tools/call", "params": params})
            if result.get("isError"):
                raise RuntimeError(result)
            return result

        stop = threading.Timer(seconds, process.kill)
        stop.start()
        try:
            greeting, _, listed = (ask(message) for message in HANDSHAKE)
            yield greeting, listed, tell
        finally:
            stop.cancel()
            process.kill()


if __name__ == "__main__":
    print(table(measure()))
