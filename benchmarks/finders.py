"""Programs that find tools, asked in turns: Kiwi, FastMCP's search and SQLite's, each over the same file of tools."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_text
from labelled import TOP
from peers import PEERS

_HERE = Path(__file__).parent
ADAPTER = _HERE / "discovery_adapter.py"
_GRACE = 20.0
WORDS, DEFAULT = "Kiwi, words only", "Kiwi"
PLAIN, FIELDS = "FTS5", "FTS5 with fields"
FASTMCP = "FastMCP's search transform"
_KIWI = (sys.executable, str(ADAPTER))
_FTS5 = (sys.executable, str(_HERE / "fts5_search.py"))
_COMMANDS = {
    WORDS: (*_KIWI, "--words"),
    DEFAULT: _KIWI,
    PLAIN: _FTS5,
    FIELDS: (*_FTS5, "--fields"),
    FASTMCP: (str(PEERS / "fastmcp" / "bin" / "python"), str(_HERE / "fastmcp_search.py")),
}


@dataclass(slots=True)
class Finder:
    """A program that is ready, and how long each of its answers took, in milliseconds."""

    name: str
    process: subprocess.Popen[str]
    took: list[float] = field(default_factory=list)

    def ask(self, need: str) -> list[str]:
        """Return the ids of what it finds, best first."""
        return self.tell({"id": "", "query": need, "k": TOP})

    def tell(self, said: JsonObject) -> list[str]:
        """Return what it answers to one line."""
        to, back = _pipe(self.process.stdin), _pipe(self.process.stdout)
        asked = json.dumps(said)
        began = time.perf_counter()
        to.write(f"{asked}\n")
        to.flush()
        line = back.readline()
        self.took.append((time.perf_counter() - began) * 1_000)
        if not line:
            raise RuntimeError(f"{self.name} ended at {asked}")
        found: Json = json.loads(line)
        return [*map(as_text, as_list(found))]

    @property
    def resident_mb(self) -> float:
        """How much memory it holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return int(lines["VmRSS"].split()[0]) / 1_000


def has_fastmcp() -> bool:
    """Whether set-up has installed FastMCP, which has an environment of its own."""
    return Path(_COMMANDS[FASTMCP][0]).exists()


@contextmanager
def started(
    names: Sequence[str], tools: Path, *, keep: Path | None = None, encode: int | None = None, homes: Path | None = None
) -> Iterator[list[Finder]]:
    """Give programs that have indexed a file of tools.

    `keep` is where Kiwi keeps what it made of their texts, and `homes` where it keeps all that it made for the next
    run; `encode` is how many texts become vectors, if not all.
    """
    response = {"--keep": keep, "--encode": encode, "--homes": homes}
    own = [word for option, value in response.items() if value for word in (option, str(value))]
    with ExitStack() as stack:
        yield [stack.enter_context(_started(name, own, tools)) for name in names]


@contextmanager
def _started(name: str, own: Sequence[str], tools: Path) -> Iterator[Finder]:
    is_kiwi = name in {WORDS, DEFAULT}
    command = [*_COMMANDS[name], *(own if is_kiwi else ()), str(tools)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            while not (line := _pipe(process.stdout).readline()).startswith("READY"):
                if not line:
                    raise RuntimeError(f"{name} ended before it was ready")
            yield Finder(name, process)
        finally:
            _pipe(process.stdin).close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            process.kill()


def _pipe(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found
