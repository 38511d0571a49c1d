"""Compaction: when a conversation fills the model's context, its middle is replaced by a summary; the journal stays.

The program with its inputs, messages of people and the last two turns stay as they are. A call is never separated from
its result. The gain is measured by the provider's count of the next request.
"""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.domain.json import compact
from kiwi_mcp.domain.messages import Message, TextPart, ToolCallPart, ToolResultPart
from kiwi_mcp.kernel.threads.hooks import pass_hooks
from kiwi_mcp.kernel.threads.model import ask_summary
from kiwi_mcp.kernel.threads.steps import Step, unless_continued
from kiwi_mcp.kernel.threads.work import ThreadWork

FULL = 0.8
"""The part of the context window from which a conversation is compacted."""
_BYTES_PER_TOKEN = 4
_STRIKES, _IN_A_ROW = 2, 3
_QUOTED = 4_000
"""The most characters of one result that the summary is made from."""
_ASKED = (
    "The conversation fills the context window of the model, and summaries do not make enough room. May it continue?"
)


async def make_room(work: ThreadWork) -> Step | None:
    """Compact the conversation if it nearly fills the context; return how the thread waits or ends, if it does."""
    state = work.state
    tokens = (state.last_input or work.input_bound() // _BYTES_PER_TOKEN) + (
        state.new_bytes // _BYTES_PER_TOKEN if state.last_input else 0
    )
    if not work.window or tokens < FULL * work.window:
        return None
    if step := await pass_hooks(work, "context_window_pressure"):
        return step
    middle = state.split()[1]
    if not middle or state.strikes >= _STRIKES or state.compactions >= _IN_A_ROW:
        return await unless_continued(work, f"context:{state.model_seq}", "budget", _ASKED, limit="context")
    await ask_summary(work, _transcript(middle))
    return None


def _transcript(messages: Sequence[Message]) -> str:
    """Return messages as text for a summary."""
    lines: list[str] = []
    for message in messages:
        for part in message.parts:
            match part:
                case TextPart(text):
                    lines.append(f"{message.role}: {text}")
                case ToolCallPart(name=name, arguments=arguments):
                    lines.append(f"call of {name}: {arguments[:_QUOTED]}")
                case ToolResultPart(name=name, content=content, is_error=is_error):
                    status = "failed" if is_error else "returned"
                    lines.append(f"{name} {status}: {compact(content[:_QUOTED])}")
                case _:
                    pass
    return "\n".join(lines)
