"""Processor time of one turn of a thread without its model: journal, budget, request, one recorded call of an item.

Usage: agent_turns.py [TURNS...]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import to_builtins

from kiwi_mcp import Kernel
from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.messages import ModelReply, TextPart, TokenUsage, ToolCallPart
from kiwi_mcp.domain.threads import NewEvent
from kiwi_mcp.kernel.threads.cassette import Cassette, RecordedReplies, RecordedTurn
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import StartRequest, new_thread

_PROVIDER = """tool_id: bench_llm
tool_type: runtime
executor: http_client
version: "1.0.0"
description: Recorded replies
config:
  dialect: openai_chat
  url: http://127.0.0.1:9/v1/chat/completions
  models: {bench: {context: 100000000, max_output: 1024, price: free}}
  tiers: {balanced: bench}
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
        user, project = _home(Path(folder))
        kernel = Kernel(project, user=user, cache=Path(folder, "cache"))
        try:
            await _run(kernel, 3)  # warm
            return {count: await _run(kernel, count) for count in counts}
        finally:
            await kernel.aclose()


def _home(folder: Path) -> tuple[Path, Path]:
    """Write a provider, a directive and a note, and return the user folder and the project."""
    user, project = folder / "home" / ".ai", folder / "project"
    files = {"providers/bench.yaml": _PROVIDER, "directives/bench.md": _DIRECTIVE, "knowledge/note.md": _NOTE}
    for name, text in files.items():
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text(text)
    project.mkdir()
    return user, project


async def _run(kernel: Kernel, count: int) -> float:
    services = kernel._services  # noqa: SLF001 - a benchmark of the loop itself
    runner = services.one(ThreadRunner)
    context = services.context(NO_CALLER, services.catalogs.at(None))
    thread, start = new_thread(StartRequest("bench", {}), context)
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


def table(counts: Sequence[int] = (10, 100, 1_000)) -> str:
    """Return the figures as a table."""
    found = asyncio.run(measure_turns(counts))
    rows = "\n".join(f"| {count:,} | {found[count]:.2f} |" for count in counts)
    return f"| Turns of the thread | CPU per turn (ms) |\n|---:|---:|\n{rows}\n"


if __name__ == "__main__":
    print(table([int(word) for word in sys.argv[1:]] or (10, 100, 1_000)))
