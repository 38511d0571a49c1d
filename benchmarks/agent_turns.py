"""Processor time of one turn of a thread: journal, budget, request, one recorded call of an item.

Without a model (recorded replies), and against a model on loopback beside the agent loops of others, in turns.
Usage: agent_turns.py [TURNS...]
       agent_turns.py --client ADDRESS TURNS...
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import to_builtins

from kiwi_mcp import Kernel
from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.domain.messages import ModelReply, TextPart, TokenUsage, ToolCallPart
from kiwi_mcp.domain.threads import NewEvent
from kiwi_mcp.kernel.threads.recordings import Cassette, RecordedReplies, RecordedTurn
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import StartRequest, new_thread

_FOLDER = Path(__file__).parent
_PEERS = _FOLDER.parent / ".venv" / "bench" / "agents" / "bin" / "python"
_OTHERS = ("openai SDK", "anthropic SDK", "smolagents", "openai-agents", "langgraph", "pydantic-ai")
_FEW = 100
"""The most turns that other loops are measured with: most of them need minutes for 1,000."""
_KIWI = "Kiwi: journal, budget, recorded call"
_ADDRESS = "127.0.0.1:9"
_COUNTS = (10, 100, 1_000)
_PROVIDER = """tool_id: bench_{count}
tool_type: runtime
executor: http_client
version: "1.0.0"
description: Recorded replies
config:
  dialect: openai_chat
  url: http://{address}/run{process}-{count}/{count}/execute/v1/chat/completions
  models: {{bench: {{context: 100000000, max_output: 1024, price: free}}}}
  tiers: {{balanced: bench}}
"""
_DIRECTIVE = """# bench

```xml
<directive name="bench" version="1.0.0">
  <metadata>
    <description>Read a note again and again</description>
    <category>bench</category>
    <author>bench</author>
    <permissions><execute resource="tool" id="*"/></permissions>
    <limits turns="100000" tokens="1000000000" tool_calls="100000" duration="3600"/>
  </metadata>
  <process><step name="read"><action>Read the note.</action></step></process>
</directive>
```
"""
_NOTE = "---\nid: note\ntitle: Note\nversion: 1.0.0\n---\nA kiwi is a bird.\n"


async def measure_turns(counts: Sequence[int]) -> dict[int, float]:
    """Return the processor time of one turn in milliseconds, for threads with each number of turns."""
    with tempfile.TemporaryDirectory() as folder:
        user, project = _home(Path(folder), _ADDRESS, (3, *counts))
        kernel = Kernel(project, user=user, cache=Path(folder, "cache"))
        try:
            await _run(kernel, 3)  # warm
            return {count: await _run(kernel, count) for count in counts}
        finally:
            await kernel.aclose()


def _home(folder: Path, address: str, counts: Sequence[int]) -> tuple[Path, Path]:
    """Write a provider for each number of turns, a directive and a note, and return the user folder and the project."""
    user, project = folder / "home" / ".ai", folder / "project"
    files = {"directives/bench.md": _DIRECTIVE, "knowledge/note.md": _NOTE}
    files["policy.yaml"] = json.dumps({"hosts": {"allow": ["127.0.0.1"]}})
    for count in counts:
        text = _PROVIDER.format(count=count, address=address, process=os.getpid())
        files[f"providers/bench_{count}.yaml"] = text
    for name, text in files.items():
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text(text)
    project.mkdir()
    return user, project


async def measure_client(address: str, counts: Sequence[int]) -> dict[int, float]:
    """Return the processor time of one turn in milliseconds, for threads that a model on loopback answers."""
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        user, project = _home(Path(folder), address, (3, *counts))
        kernel = Kernel(project, user=user, cache=Path(folder, "cache"))
        try:
            for count in (3, *counts):  # the first is warm-up
                request: JsonObject = {"action": "start", "item_id": "bench", "model": f"bench_{count}/bench"}
                began = time.process_time()
                answer = await kernel.call("thread", {**request, "wait": True})
                found[count] = (time.process_time() - began) * 1_000 / count
                if as_object(answer.content.get("usage")).get("turns") != count:
                    raise SystemExit(f"The thread did not make {count} turns: {answer.content}")
        finally:
            await kernel.aclose()
    return {count: found[count] for count in counts}


async def _run(kernel: Kernel, count: int) -> float:
    services = kernel._services  # noqa: SLF001 - a benchmark of the loop itself
    runner = services.one(ThreadRunner)
    context = services.context(NO_CALLER, services.catalogs.at(None))
    thread, start = new_thread(StartRequest("bench", {}, model=f"bench_{count}/bench"), context)
    events = [NewEvent("created", {"item": thread.item}), NewEvent("prompt", to_builtins(start))]
    made = runner.stores.threads.create(thread, events)
    replies = RecordedReplies(Cassette(format=1, item="bench", turns=tuple(_turns(count)), outcome={}))
    began = time.process_time()
    await runner.replay(made.id, NO_CALLER, replies)
    spent = time.process_time() - began
    ended = runner.stores.threads.get(made.id)
    if ended.status != "completed" or ended.usage.turns != count:
        raise SystemExit(f"The thread is {ended.status} after {ended.usage.turns} turns: {ended.message}")
    return spent * 1_000 / count


def _turns(count: int) -> list[RecordedTurn]:
    usage = TokenUsage(input=100, output=20)
    arguments = '{"item_id": "note", "item_type": "knowledge"}'
    # The spaces make the calls differ: the same call three times in a row asks the owner.
    calls = [
        ToolCallPart(f"call_{number}", "execute", f"{arguments}{' ' * (number % 7)}") for number in range(count - 1)
    ]
    turns = [RecordedTurn((), ModelReply((call,), "calls", usage, "bench")) for call in calls]
    return [*turns, RecordedTurn((), ModelReply((TextPart("Done."),), "end", usage, "bench"))]


@contextmanager
def running_model() -> Iterator[str]:
    """Run the model on loopback, and give its address."""
    command = [sys.executable, "-IS", str(_FOLDER / "agent_model.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as model:
        try:
            assert model.stdout is not None
            yield f"127.0.0.1:{int(model.stdout.readline())}"
        finally:
            model.kill()


def measure_loops(counts: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
    """Return the medians of the CPU per turn of Kiwi and of other loops, each in a new process, in turns."""
    few = [count for count in counts if count <= _FEW]
    clients = {_KIWI: ([sys.executable, str(_FOLDER / "agent_turns.py"), "--client"], counts)}
    if _PEERS.exists():
        clients |= {name: ([str(_PEERS), str(_FOLDER / "agent_clients.py"), name], few) for name in _OTHERS}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    with running_model() as address:
        for _ in range(rounds):
            for name, (command, own) in clients.items():
                words = [*command, address, *map(str, own)]
                done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=1_800)
                if done.returncode:
                    raise SystemExit(f"{name}: {done.stderr[-2_000:]}")
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {
        name: {count: statistics.median(one[str(count)] for one in found[name]) for count in own}
        for name, (_, own) in clients.items()
    }


def table(counts: Sequence[int] = _COUNTS, rounds: int = 3) -> str:
    """Return the figures as a table."""
    alone = asyncio.run(measure_turns(counts))
    rows = {"Kiwi with recorded replies, without a connection": alone, **measure_loops(counts, rounds)}
    heads = " | ".join(f"{count:,} turns" for count in counts)
    lines = [f"| CPU ms per turn | {heads} |", "|---" + "|---:" * len(counts) + "|"]
    for name, row in rows.items():
        figures = (f"{row[count]:.2f}" if count in row else "" for count in counts)
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        print(json.dumps(asyncio.run(measure_client(sys.argv[2], [int(word) for word in sys.argv[3:]]))))
    else:
        print(table([int(word) for word in sys.argv[1:]] or _COUNTS))
