"""What the receipt of a call costs, against the same call without one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.recorder import CallRecord, Recorder
from kiwi_mcp.kernel.verb import Verb
from measure import Case, Measured, interleaved
from tools import BASH, create, relax, run

_Way = Callable[[Recorder, str, Verb | None, JsonObject], CallRecord | None]


def measure(turns: int) -> list[Measured]:
    """Return the cost of a bash tool without a receipt, and with one."""
    loop, with_one = asyncio.new_event_loop(), Recorder.call
    with tempfile.TemporaryDirectory() as name, closing(loop):
        folder = Path(name)
        (folder / "project").mkdir()
        kernel = Kernel(folder / "project", user=folder / "user", cache=folder / "cache")
        create(loop, kernel, "bash_echo", "bash_runtime", "main.sh", BASH)
        relax(loop, kernel, "bash_echo", "trusted")
        call = run(loop, kernel, "bash_echo")

        def made(way: _Way) -> Callable[[], None]:
            def turn() -> None:
                Recorder.call = way  # type: ignore[method-assign, assignment]  # the one thing that differs
                call()

            return turn

        cases = [Case("bash tool without a receipt", made(lambda *_: None)), Case("bash tool", made(with_one))]
        try:
            return interleaved(cases, turns=turns, warm=3)
        finally:
            Recorder.call = with_one  # type: ignore[method-assign]  # as it was
            loop.run_until_complete(kernel.aclose())
