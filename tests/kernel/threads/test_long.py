"""A thread of many turns: what it has in memory is its conversation, and nothing else grows."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins
from tests.kernel.threads.conftest import ALL_TOOLS, DIRECTIVE

from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.messages import ModelReply, TextPart, TokenUsage, ToolCallPart
from kiwi_mcp.domain.threads import NewEvent
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.threads.recordings import Cassette, RecordedReplies
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import StartRequest, new_thread

PROVIDER = """tool_id: local
tool_type: runtime
executor: http_client
version: "1.0.0"
description: Is never asked
config:
  dialect: {dialect}
  url: http://127.0.0.1:9
  models: {{m: {{context: 100000000, max_output: 64, price: free}}}}
"""
LIMITS = '<limits turns="100000" tokens="1000000000" tool_calls="100000" duration="3600"/>'
BIRD = "A kiwi is a bird. " * 100
SOAK = (pytest.mark.soak, pytest.mark.timeout(900))
EARLY = 40
"""After how many turns nothing is loaded for the first time any more."""


class MeasuredReplies(RecordedReplies):
    """Calls the same tool in every turn but the last, and measures the memory when it is asked."""

    def __init__(self, turns: int) -> None:
        super().__init__(Cassette(format=1, item="long", turns=(), outcome={}))
        self._left = turns
        self.sizes: list[int] = []

    def next(self) -> ModelReply:
        self._left -= 1
        number = len(self.sizes)
        if number in {0, EARLY} or not self._left:
            gc.collect()
        self.sizes.append(tracemalloc.get_traced_memory()[0])
        call = ToolCallPart(f"call_{number}", "execute", f'{{"item_id": "note"{" " * (number % 7)}}}')
        part = call if self._left else TextPart("Done.")
        return ModelReply((part,), "calls" if self._left else "end", TokenUsage(input=10, output=2), "m")


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.req("N1")
@pytest.mark.parametrize(
    ("dialect", "turns"),
    [
        ("openai_chat", 100),
        pytest.param("openai_chat", 1_000, marks=SOAK),
        pytest.param("anthropic", 1_000, marks=SOAK),
    ],
)
async def test_the_memory_of_a_thread_grows_by_its_conversation_alone(
    home: Path, project: Path, dialect: str, turns: int, traced: None, anyio_backend: str
) -> None:
    user = home / ".ai"
    directive = DIRECTIVE.format(name="long", permissions=ALL_TOOLS, limits=LIMITS, outputs="", model="")
    note = f"---\nid: note\ntitle: Note\nversion: 1.0.0\n---\n{BIRD}\n"
    files = {"providers/local.yaml": PROVIDER.format(dialect=dialect), "directives/long.md": directive}
    for name, text in {**files, "knowledge/note.md": note}.items():
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text(text)
    kernel, replies = Kernel(project, user=user), MeasuredReplies(turns)
    services = kernel._services
    runner, context = services.one(ThreadRunner), services.context(NO_CALLER, services.catalogs.at(None))
    thread, start = new_thread(StartRequest("long", {}), context)
    runner.stores.threads.create(thread, [NewEvent("created", {}), NewEvent("prompt", to_builtins(start))])

    await runner.replay(thread.id, NO_CALLER, replies)

    ended = runner.stores.threads.get(thread.id)
    await kernel.aclose()
    assert (ended.status, ended.usage.turns) == ("completed", turns)
    # The result of a call is a part of a message, of the bytes to send, and of the request that is being sent.
    grown = (replies.sizes[-1] - replies.sizes[EARLY]) / (turns - 1 - EARLY)
    assert grown < 3 * len(BIRD) + 2_500
