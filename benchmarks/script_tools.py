"""What a client gets: script tools called through `kiwi serve`, in their sandbox, against the same programs by hand."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from gateways import Open, Row, started, take_turns
from load import Pipes, cpu_of, until_it_answers
from peers import KIWI, Place, executed

_BASH = """\
# tool_type: script
# executor: bash_runtime
# version: 1.0.0
# description: Echo a text
# parameters:
#   - {name: text, type: string, required: true}
printf '%s' "$KIWI_PARAM_text"
"""
_PYTHON = '''\
"""Echo a text."""

__version__ = "1.0.0"
__tool_type__ = "script"
__executor_id__ = "python_runtime"


def main(text: str) -> str:
    return text
'''
_PLAIN_PYTHON = "import os\n\nprint(os.environ['KIWI_PARAM_text'])\n"
_PYTHON_PROGRAM = getattr(sys, "_base_executable", sys.executable)
_FILES: Mapping[str, str] = {
    "bash_sandboxed.sh": _BASH,
    "bash_relaxed.sh": _BASH,
    "python_sandboxed.py": _PYTHON,
    "python_relaxed.py": _PYTHON,
}
_BWRAP = ("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "--die-with-parent")


class Spawned:
    """A program that is started once for each text, which it prints."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    async def ask(self, text: str) -> bytes:
        """Start the program, and return what it prints."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, "KIWI_PARAM_text": text},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        printed, _ = await process.communicate()
        return printed

    def rest(self) -> None:
        """Do nothing: every process has ended."""


def measure(turns: int) -> Mapping[str, list[Row]]:
    """Return the rows of bash and of Python, the plain program first."""
    return asyncio.run(_measure(turns))


async def _measure(turns: int) -> Mapping[str, list[Row]]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        place = await asyncio.to_thread(_prepared, Place(Path(name), ""))
        scripts = {"bash": place.folder / "main.sh", "python": place.folder / "main.py"}
        by_hand: Mapping[str, Sequence[str]] = {
            "bash": ("bash", str(scripts["bash"])),
            "python": (_PYTHON_PROGRAM, str(scripts["python"])),
        }
        found: dict[str, list[Row]] = {}
        for language, command in by_hand.items():
            async with AsyncExitStack() as stack:
                plain = [Open(f"{language} by hand", Spawned(command), _children)]
                if shutil.which("bwrap"):
                    plain.append(Open(f"bwrap and {language} by hand", Spawned((*_BWRAP, *command)), _children))
                tools = [
                    await stack.enter_async_context(_serving(place, f"{language}_{level}"))
                    for level in ("relaxed", "sandboxed")
                ]
                found[language] = await take_turns([*plain, *tools], turns)
    return found


def _children() -> float:
    ended = os.times()
    return ended.children_user + ended.children_system


def _prepared(place: Place) -> Place:
    """Write, sign and relax the tools of a new project."""
    place.folder.chmod(0o755)  # a sandbox that root starts has another user
    tools = place.project / ".ai" / "tools"
    for folder in (place.folder / "home" / ".ai", tools):
        folder.mkdir(parents=True)
    (place.folder / "main.sh").write_text(_BASH, encoding="utf-8")
    (place.folder / "main.py").write_text(_PLAIN_PYTHON, encoding="utf-8")
    for name, text in _FILES.items():
        (tools / name).write_text(text, encoding="utf-8")
        _kiwi(place, "sign", Path(name).stem)
        if "relaxed" in name:
            _kiwi(place, "tool", "relax", Path(name).stem, "--to", "trusted")
    return place


def _kiwi(place: Place, *words: str) -> None:
    environment = dict(place.environment)
    subprocess.run([KIWI, *words], cwd=place.project, env=environment, capture_output=True, check=True, timeout=60)


@asynccontextmanager
async def _serving(place: Place, tool: str) -> AsyncIterator[Open]:
    """Start `kiwi serve` for one tool; its row counts the processor time of the server and its children."""
    async with started((KIWI, "serve", "--project", str(place.project)), place) as process:
        pipes = Pipes(process, partial(executed, item=tool))
        try:
            await until_it_answers(pipes.greet)
            await until_it_answers(partial(pipes.ask, "hello"))
            yield Open(f"{tool.replace('_', ' tool, ')}, through `kiwi serve`", pipes, partial(cpu_of, process.pid))
        finally:
            await pipes.aclose()


if __name__ == "__main__":
    for rows in measure(3).values():
        for row in rows:
            print(row.name, *(f"{number:.1f}" for number in (*row.middle_ms, *row.rate)))
