"""`kiwi search` at work: an answer at once, and then the rest of the index, while whoever asked looks on."""

from __future__ import annotations

import asyncio
import sys

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.surfaces.cli.progress import reporting
from kiwi_mcp.surfaces.cli.screen import talk
from kiwi_mcp.surfaces.cli.shell import Shell

_AFTERWARDS, _LONGEST_WAIT = 60.0, 300.0
"""For how many seconds the rest is indexed after an answer, and before one that is waited for."""
_VERB = "search"
_HOW = "`kiwi search … --wait` waits until all is indexed; `kiwi serve` and `kiwi up` do it in the background."


def search(shell: Shell, request: JsonObject, *, is_waiting: bool) -> None:
    """Search, show what was found, and go on with what is not indexed yet where a person sees that."""
    shown: list[Answer] = []
    try:
        asyncio.run(_search(shell, request, shown, is_waiting=is_waiting))
    except KeyboardInterrupt:
        if not shown:
            raise
        # Who has their answer, and does not care to wait for the next one, has ended nothing that failed.


async def _search(shell: Shell, request: JsonObject, shown: list[Answer], *, is_waiting: bool) -> None:
    async with shell.opened() as kernel:
        answer = await shell.call(kernel, _VERB, request)
        if is_waiting and _is_partial(answer):
            await _index(shell, kernel, _LONGEST_WAIT)
            answer = await shell.call(kernel, _VERB, request)
        shell.show(answer, view=_VERB)
        shown.append(answer)
        if shell.is_json or not _is_partial(answer):
            return
        if sys.stderr.isatty() and not is_waiting:
            await _index(shell, kernel, _AFTERWARDS)
        else:
            talk(f"hint: {_HOW}")


def _is_partial(answer: Answer) -> bool:
    return "indexing" in answer.content


async def _index(shell: Shell, kernel: Kernel, seconds: float) -> None:
    with reporting(is_quiet=shell.is_json) as report:
        await kernel.index(_in_words(report), seconds=seconds)


def _in_words(report: Report) -> Report:
    def told(step: Progress) -> None:
        report(Progress(f"indexing {step.done:,.0f} of {step.total:,.0f}; Ctrl-C stops, what is done is kept"))

    return told
