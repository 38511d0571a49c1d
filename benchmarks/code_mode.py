"""Ten calls of a model against one program of ten calls: requests to the model, tokens that it reads, time.

The model is recorded, so its own time is not in the figures. Usage: code_mode.py [CALLS]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, to_builtins

from kiwi_mcp import Kernel
from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import ModelReply, TextPart, TokenUsage, ToolCallPart
from kiwi_mcp.domain.threads import NewEvent
from kiwi_mcp.domain.token_cost import cost_of
from kiwi_mcp.kernel.threads.recordings import Cassette, RecordedReplies, RecordedTurn
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import StartRequest, new_thread
from kiwi_mcp.kernel.threads.state import ThreadState

_CALLS, _ROUNDS = 10, 3
_PROVIDER = """tool_id: bench_model
tool_type: runtime
executor: http_client
version: "1.0.0"
description: Recorded replies
config:
  dialect: openai_chat
  url: http://127.0.0.1:9/v1/chat/completions
  models: {bench: {context: 1000000, max_output: 1024, price: free}}
  tiers: {balanced: bench}
"""
_DIRECTIVE = """# bench

```xml
<directive name="bench" version="1.0.0">
  <metadata>
    <description>Count the open orders</description>
    <category>bench</category>
    <author>bench</author>
    <permissions><execute resource="tool" id="*"/><execute resource="kiwi-mcp" action="*"/></permissions>
  </metadata>
  <process><step name="count"><action>Count the open orders of every page.</action></step></process>
</directive>
```
"""
_ORDERS = """# tool_type: script
# executor: bash_runtime
# version: 1.0.0
# description: One page of orders
# effect: pure
# parameters: [{name: page, type: integer, required: true}]
echo '%s'
"""
_OUTER = """# tool_type: script
# executor: bash_runtime
# version: 1.0.0
# description: The first page of orders
# effect: pure
# needs: {items: [orders]}
kiwi call orders '{"page": 1}'
"""
_PROGRAM = """import asyncio
pages = await asyncio.gather(*[tools.orders(page=number) for number in range(%d)])
sum(len([one for one in page if one["state"] == "open"]) for page in pages)"""


class Way(Struct, frozen=True):
    """One way to do the task: requests to the model, tokens in them, and milliseconds without the model."""

    name: str
    requests: int
    tokens: int
    ms: float


def _home(folder: Path) -> tuple[Path, Path]:
    user, project = folder / "home" / ".ai", folder / "project"
    rows = [{"id": number, "state": "open" if number % 3 else "paid", "total": number * 7} for number in range(50)]
    files = {
        "directives/bench.md": _DIRECTIVE,
        "providers/bench_model.yaml": _PROVIDER,
        "tools/orders.sh": _ORDERS % json.dumps(rows),
        "tools/outer.sh": _OUTER,
    }
    for name, text in files.items():
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text(text)
    project.mkdir()
    return user, project


def _replies(calls: Sequence[JsonObject]) -> tuple[RecordedTurn, ...]:
    usage = TokenUsage(input=100, output=20)
    made = [ToolCallPart(f"call_{number}", "execute", json.dumps(one)) for number, one in enumerate(calls)]
    turns = [RecordedTurn((), ModelReply((call,), "calls", usage, "bench")) for call in made]
    return (*turns, RecordedTurn((), ModelReply((TextPart("330"),), "end", usage, "bench")))


async def _thread(kernel: Kernel, name: str, calls: Sequence[JsonObject]) -> Way:
    services = kernel._services  # noqa: SLF001 - a benchmark of the loop itself
    runner = services.one(ThreadRunner)
    context = services.context(NO_CALLER, services.catalogs.at(None))
    thread, start = new_thread(StartRequest("bench", {}, model="bench_model/bench"), context)
    events = [NewEvent("created", {"item": thread.item}), NewEvent("prompt", to_builtins(start))]
    made = runner.stores.threads.create(thread, events)
    replies = RecordedReplies(Cassette(format=1, item="bench", turns=_replies(calls), outcome={}))
    began = time.monotonic()
    await runner.replay(made.id, NO_CALLER, replies)
    spent = (time.monotonic() - began) * 1_000
    if (ended := runner.stores.threads.get(made.id)).status != "completed":
        raise SystemExit(f"The thread is {ended.status}: {ended.message}")
    state, tokens, requests = ThreadState(), 0, 0
    fixed = f"{start.system}{msgspec.json.encode(start.tools).decode()}"
    for event in runner.stores.threads.events(made.id):
        if event.kind == "model":
            requests += 1
            tokens += cost_of(fixed + msgspec.json.encode(state.request_messages()).decode()).tokens
        state.fold(event)
    return Way(name, requests, tokens, spent)


async def measure(calls: int) -> tuple[list[Way], dict[str, float]]:
    """Return the ways to make some calls, and the milliseconds of a tool alone and of one that calls it."""
    with tempfile.TemporaryDirectory() as folder:
        user, project = _home(Path(folder))
        kernel = Kernel(project, user=user, cache=Path(folder, "cache"))
        single: list[JsonObject] = [{"item_id": "orders", "parameters": {"page": page}} for page in range(calls)]
        program: list[JsonObject] = [{"action": "code", "parameters": {"code": _PROGRAM % calls}}]
        found: dict[str, list[Way]] = {}
        nested: dict[str, list[float]] = {}
        try:
            for name in ("orders", "outer", "bench"):
                await kernel.call("execute", {"action": "sign", "item_id": name})
            for number in range(_ROUNDS + 1):  # the first is warm-up
                for name, made in ((f"{calls} calls of the model", single), (f"one program of {calls} calls", program)):
                    way = await _thread(kernel, name, made)
                    found.setdefault(name, []).extend([way] if number else [])
                for item in ("orders", "outer"):
                    given: JsonObject = {"page": 1} if item == "orders" else {}
                    began = time.monotonic()
                    await kernel.call("execute", {"item_id": item, "parameters": given})
                    nested.setdefault(item, []).append((time.monotonic() - began) * 1_000)
        finally:
            await kernel.aclose()
    ways = [msgspec.structs.replace(one[0], ms=statistics.median(each.ms for each in one)) for one in found.values()]
    return ways, {name: statistics.median(times[1:]) for name, times in nested.items()}


def table(calls: int = _CALLS) -> str:
    """Return the figures as a table."""
    ways, nested = asyncio.run(measure(calls))
    lines = ["| way | requests to the model | tokens it reads | ms without the model |", "|---|---:|---:|---:|"]
    lines += [f"| {way.name} | {way.requests} | {way.tokens:,} | {way.ms:.0f} |" for way in ways]
    about = f"A tool alone takes {nested['orders']:.0f} ms, and a tool that calls it {nested['outer']:.0f} ms."
    return "\n".join([*lines, "", about, ""])


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if sys.argv[1:] else _CALLS))
