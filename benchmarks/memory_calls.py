"""Reads and writes of the memory through the kernel, beside a plain file with a commit of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Kernel
from measure import Case, Measured, interleaved

_FILES = 200
_TEXT = "# Note {}\n\n" + "Kiwis are birds that cannot fly.\n" * 30


def measure(turns: int) -> list[Measured]:
    """Return a write, a read and a search among some hundred files, the write by hand first."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as name, closing(loop):
        folder, numbers = Path(name), count()
        plain = folder / "plain"
        (folder / "project" / ".ai").mkdir(parents=True)
        subprocess.run(["git", "init", "-q", str(plain)], check=True, timeout=60)
        kernel = Kernel(folder / "project", user=folder / "user", cache=folder / "cache")

        def call(item: str, **parameters: str) -> None:
            request: JsonObject = {"item_id": item, "parameters": dict(parameters)}
            answer = loop.run_until_complete(kernel.call("execute", request, Caller(is_owner=True)))
            if answer.is_error:
                raise RuntimeError(json.dumps(answer.content))

        def write(number: int) -> None:
            call("memory_write", path=f"notes/note-{number}.md", content=_TEXT.format(number))

        loop.run_until_complete(
            kernel.call("approvals", {"action": "add_rule", "item": "*/memory_*"}, Caller(is_owner=True))
        )
        for number in range(_FILES):
            write(number)
        cases = [
            Case("a file and `git commit` by hand", _by_hand(plain, numbers)),
            Case("memory_write of a new file", lambda: write(_FILES + next(numbers))),
            Case("memory_read", lambda: call("memory_read", path="notes/note-7.md")),
            Case("memory_search", lambda: call("memory_search", query="birds that cannot fly")),
        ]
        measured = interleaved(cases, turns=turns)
        loop.run_until_complete(kernel.aclose())
    return measured


def _by_hand(folder: Path, numbers: count[int]) -> Callable[[], None]:
    git = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        "-c",
        "commit.gpgsign=false",
    ]

    def turn() -> None:
        (folder / f"note-{next(numbers)}.md").write_text(_TEXT)
        for words in (["add", "."], ["commit", "-q", "-m", "A note"]):
            subprocess.run([*git, *words], check=True, timeout=60)

    return turn
