"""What running a tool costs, against starting the same program by hand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Kernel
from measure import Case, Measured, interleaved

_OWNER = Caller(is_owner=True)
BASH = "printf '%s' \"$KIWI_PARAM_text\"\n"
_PYTHON = "import json, sys\n\n\ndef main(text):\n    return {'text': text}\n"
_PLAIN_PYTHON = "import json, sys\n\nprint(json.dumps({'text': json.load(sys.stdin)['text']}))\n"


def measure(turns: int) -> tuple[list[Measured], list[Measured]]:
    """Return the cost of a bash tool and of a Python tool, each after the plain program."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as name, closing(loop):
        folder = Path(name)
        (folder / "project").mkdir()
        kernel = Kernel(folder / "project", user=folder / "user", cache=folder / "cache")
        create(loop, kernel, "bash_echo", "bash_runtime", "main.sh", BASH)
        create(loop, kernel, "python_echo", "python_runtime", "main.py", _PYTHON)
        for tool_id in ("bash_echo", "python_echo"):
            relax(loop, kernel, tool_id, "trusted")
        (folder / "main.sh").write_text(BASH, encoding="utf-8")
        (folder / "main.py").write_text(_PLAIN_PYTHON, encoding="utf-8")
        python = getattr(sys, "_base_executable", sys.executable)
        by_hand = [
            Case("bash main.sh", _spawn(["bash", str(folder / "main.sh")])),
            Case("python main.py", _spawn([python, str(folder / "main.py")])),
        ]
        through = [
            Case("bash tool through Kiwi", run(loop, kernel, "bash_echo")),
            Case("Python tool through Kiwi", run(loop, kernel, "python_echo")),
        ]
        bash, plain = (
            interleaved([hand, tool], turns=turns, warm=3) for hand, tool in zip(by_hand, through, strict=True)
        )
    return bash, plain


def create(
    loop: asyncio.AbstractEventLoop,
    kernel: Kernel,
    tool_id: str,
    runtime: str,
    entrypoint: str,
    text: str,
    *,
    isolation: str = "trusted",
) -> None:
    """Create a tool of one file that echoes a text, and asks to be held by a level at least."""
    parameters: JsonObject = {
        "tool_type": "script",
        "executor": runtime,
        "manifest": {
            "version": "1.0.0",
            "description": "Echo",
            "isolation": isolation,
            "config": {"entrypoint": entrypoint},
            "parameters": [{"name": "text", "type": "string", "required": True}],
        },
        "files": {entrypoint: text},
    }
    _ask(loop, kernel, "execute", {"action": "create", "item_id": tool_id, "parameters": parameters})


def relax(loop: asyncio.AbstractEventLoop, kernel: Kernel, tool_id: str, level: str) -> None:
    """Let a tool run at a level, whatever its origin, as its owner may."""
    _ask(loop, kernel, "relax", {"action": "apply", "item_id": tool_id, "to": level})


def _ask(loop: asyncio.AbstractEventLoop, kernel: Kernel, verb: str, payload: JsonObject) -> None:
    answer = loop.run_until_complete(kernel.call(verb, payload, _OWNER))
    if answer.is_error:
        raise RuntimeError(answer.content)


def _spawn(argv: list[str]) -> Callable[[], None]:
    def turn() -> None:
        subprocess.run(argv, input=b'{"text": "hello"}', capture_output=True, check=True, timeout=60)

    return turn


def run(loop: asyncio.AbstractEventLoop, kernel: Kernel, tool_id: str) -> Callable[[], None]:
    """Return a turn that runs a tool."""

    def turn() -> None:
        _ask(loop, kernel, "execute", {"item_id": tool_id, "parameters": {"text": "hello"}})

    return turn
