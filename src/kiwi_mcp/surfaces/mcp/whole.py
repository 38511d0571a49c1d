"""Large results made whole again, for readers that cannot go on from a preview."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from kiwi_mcp.domain.caller import NOBODY
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.kernel import Answer
from kiwi_mcp.surfaces.mcp.port import KernelApi

_PAGES = 256
"""How many pages are read at the most: sixteen million characters."""


async def whole(kernel: KernelApi, answer: Answer) -> JsonObject:
    """Return what an answer holds, with the whole of a result that it shows only the beginning of."""
    handle = as_text(answer.content.get("result_handle"))
    if not handle:
        return answer.content
    text = "".join([page async for page in _pages(kernel, handle)])
    rest = {word: value for word, value in answer.content.items() if not word.startswith("result_")}
    try:
        return {**rest, "result": json.loads(text)}
    except ValueError:  # a text, which is kept as it is
        return {**rest, "result": text}


async def _pages(kernel: KernelApi, handle: str) -> AsyncIterator[str]:
    offset: object = 0
    for _ in range(_PAGES):
        if not isinstance(offset, int):
            return
        page = await kernel.call("load", {"item_type": "output", "item_id": handle, "offset": offset}, NOBODY)
        yield as_text(page.content.get("content"))
        offset = page.content.get("next_offset")
