"""Ten steps of a composite against ten calls of the same bash tool."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel import Kernel
from measure import Case, Measured, interleaved

_STEPS = 10


def measure(turns: int) -> list[Measured]:
    """Return ten calls, and composites of ten steps in a row and at once, in memory and as threads."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as name, closing(loop):
        project = Path(name) / "project"
        (project / ".ai").mkdir(parents=True)
        kernel = Kernel(project, user=Path(name) / "user", cache=Path(name) / "cache")
        for effect in ("pure", "idempotent"):
            _create(loop, kernel, f"do_{effect}", _script(effect))
            _create(loop, kernel, f"row_{effect}", _composite(effect, is_row=True))
            _create(loop, kernel, f"once_{effect}", _composite(effect, is_row=False))
        cases = [
            Case("ten calls, one after another", _calls(loop, kernel, ["do_idempotent"] * _STEPS)),
            Case("ten steps in a row, in memory", _calls(loop, kernel, ["row_pure"])),
            Case("ten steps in a row, as a thread", _calls(loop, kernel, ["row_idempotent"])),
            Case("ten steps at once, in memory", _calls(loop, kernel, ["once_pure"])),
            Case("ten steps at once, as a thread", _calls(loop, kernel, ["once_idempotent"])),
        ]
        measured = interleaved(cases, turns=turns)
        loop.run_until_complete(kernel.aclose())
    return measured


def _script(effect: str) -> JsonObject:
    about: JsonObject = {"tool_type": "script", "executor": "bash_runtime", "effect": effect}
    return {**about, "files": {"main.sh": "echo 1\n"}, "config": {"entrypoint": "main.sh"}}


def _composite(effect: str, *, is_row: bool) -> JsonObject:
    steps: list[Json] = [
        {"id": f"s{number}", "tool": f"do_{effect}", "needs": [f"s{number - 1}"] if is_row and number else []}
        for number in range(_STEPS)
    ]
    return {"tool_type": "composite", "config": {"steps": steps}}


def _create(loop: asyncio.AbstractEventLoop, kernel: Kernel, name: str, words: JsonObject) -> None:
    manifest: JsonObject = {"version": "1.0.0", "description": name, **words}
    for action, parameters in (("create", manifest), ("sign", {})):
        _call(loop, kernel, {"action": action, "item_id": name, "parameters": parameters})


def _calls(loop: asyncio.AbstractEventLoop, kernel: Kernel, names: list[str]) -> Callable[[], None]:
    def turn() -> None:
        for name in names:
            _call(loop, kernel, {"item_id": name})

    return turn


def _call(loop: asyncio.AbstractEventLoop, kernel: Kernel, request: JsonObject) -> None:
    answer = loop.run_until_complete(kernel.call("execute", request))
    if answer.is_error:
        raise RuntimeError(json.dumps(answer.content))
