"""This Kiwi against the one of an earlier commit, in turns in one run: commands, and calls through `kiwi serve`.

The earlier one is unpacked from this repository's history into `.cache`, and set up by its own `scripts/setup.sh`.
Usage: before.py [TURNS]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path

from msgspec import Struct

from context import Tell, talking
from load import cpu_of
from peers import KIWI, Place

COMMIT = "7db7040"
_ROOT = Path(__file__).parents[1]
_MANIFEST = """tool_id: {name}
tool_type: script
version: "1.0.0"
executor: {runtime}
description: Says hello
config: {{entrypoint: {file}}}
"""
_TOOLS = {
    "hello": ("bash_runtime", "main.sh", "echo hello\n"),
    "hello_py": ("python_runtime", "main.py", "print('hello')\n"),
}
_CALLS: Mapping[str, tuple[str, dict[str, object]]] = {
    "search, through `kiwi serve`": ("search", {"query": "say hello"}),
    "load, as above": ("load", {"item_id": "hello"}),
    "a bash tool in its sandbox, as above": ("execute", {"item_id": "hello"}),
    "a Python tool in its sandbox, as above": ("execute", {"item_id": "hello_py"}),
}
_SECONDS = 1_200.0
_EACH = 5
"""How many calls one turn makes."""


class Compared(Struct, frozen=True):
    """The medians of one case: wall and CPU milliseconds, before and now."""

    name: str
    before: tuple[float, float]
    now: tuple[float, float]


Turn = Callable[[], tuple[float, float]]
"""One turn of a case: wall and CPU milliseconds."""


def earlier() -> str:
    """Return the `kiwi` of the earlier commit, set up where it is not yet; empty where the history lacks the commit."""
    folder = _ROOT / ".cache" / f"before-{COMMIT}"
    git = ["git", "-C", str(_ROOT), "archive", COMMIT]
    if not folder.exists():
        packed = subprocess.run(git, capture_output=True, check=False, timeout=120)
        if packed.returncode:
            return ""
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    subprocess.run([folder / "scripts" / "setup.sh"], env=env, capture_output=True, check=True, timeout=1_800)
    return str(folder / ".venv" / "bin" / "kiwi")


def measure(turns: int) -> list[Compared]:
    """Return each case, before and now; nothing where the history lacks the commit."""
    if not (old := earlier()):
        return []
    found: dict[str, tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cases = [_cases(kiwi, Place(Path(folder, name), ""), stack) for name, kiwi in (("before", old), ("now", KIWI))]
        for number in range(turns + 1):  # the first is warm-up
            for name in cases[0]:
                for side, one in enumerate(cases):
                    taken = one[name]()
                    found.setdefault(name, ([], []))[side].extend([taken] if number else [])
    return [Compared(name, *(_median(side) for side in sides)) for name, sides in found.items()]


def _median(turns: list[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = zip(*turns, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def _cases(kiwi: str, place: Place, stack: ExitStack) -> dict[str, Turn]:
    tools = place.project / ".ai" / "tools"
    command = partial(_command, place, kiwi)
    for name, (runtime, file, text) in _TOOLS.items():
        (tools / name).mkdir(parents=True)
        (tools / name / "tool.yaml").write_text(_MANIFEST.format(name=name, runtime=runtime, file=file))
        (tools / name / file).write_text(text)
        command("sign", name)()
    cases = {
        "kiwi --help": command("--help"),
        "kiwi run of a bash tool": command("run", "hello"),
        "kiwi search": command("search", "hello"),
    }
    serve = [kiwi, "serve", "--project", str(place.project)]
    cases["`kiwi serve` to an answered `tools/list`"] = partial(_started, serve, place)
    _, _, tell = stack.enter_context(talking(serve, place.environment, seconds=_SECONDS))
    return cases | {name: partial(_called, tell, *call) for name, call in _CALLS.items()}


def _command(place: Place, kiwi: str, *words: str) -> Turn:
    def turn() -> tuple[float, float]:
        return _timed(
            lambda: subprocess.run(
                [kiwi, *words],
                cwd=place.project,
                env=place.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=120,
            )
        )

    return turn


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds of something, and the CPU milliseconds of the processes that ended in it."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run()
    passed, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return passed * 1_000, cpu * 1_000


def _started(serve: list[str], place: Place) -> tuple[float, float]:
    def start() -> None:
        with talking(serve, place.environment):
            pass

    return _timed(start)


def _called(tell: Tell, name: str, arguments: dict[str, object]) -> tuple[float, float]:
    """Make some calls of a server; the CPU is that of the server and of processes that still run."""
    before, began = cpu_of(os.getpid()), time.perf_counter()
    for _ in range(_EACH):
        tell(name, arguments)
    return (time.perf_counter() - began) * 1_000 / _EACH, (cpu_of(os.getpid()) - before) * 1_000 / _EACH


def table(rows: list[Compared]) -> str:
    """Return the comparison as a table."""
    if not rows:
        return f"This repository's history does not have the commit {COMMIT}.\n"
    lines = ["| case | wall ms, before | now | ratio | CPU ms, before | now | ratio |", "|---" * 7 + "|"]
    for row in rows:
        pairs = zip(row.before, row.now, strict=True)
        lines.append(f"| {row.name} | {' | '.join(f'{was:.3g} | {now:.3g} | {now / was:.2f}' for was, now in pairs)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(measure(int(sys.argv[1]) if sys.argv[1:] else 10)))
