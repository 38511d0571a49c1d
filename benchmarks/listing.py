"""How long a client waits for its list of tools, and how large that is, by how many tools of MCP servers are known."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from measure import Case, Measured, interleaved
from peers import KIWI, STARTED, Place
from starts import HANDSHAKE

KNOWN = (10, 1_000, 10_000)
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Listing:
    """What opening a conversation takes, and the bytes of the list that comes of it."""

    measured: Measured
    size: int


def measure(turns: int) -> list[Listing]:
    """Return the listings for each number of known tools, without and with an always-send tool among them."""
    with tempfile.TemporaryDirectory() as folder:
        places = {f"{count:,} known tools": _known(Path(folder, str(count)), count) for count in KNOWN}
        sizes = {name: _listed(place) for name, place in places.items()}
        plain = interleaved([Case(name, _opened(place)) for name, place in places.items()], turns=turns)
        found = [Listing(row, sizes[row.name]) for row in plain]
        for place in places.values():
            _prefer(place)
        sizes = {name: _listed(place) for name, place in places.items()}
        more = interleaved([Case(name, _opened(place)) for name, place in places.items()], turns=turns)
    renamed = [Measured(f"{row.name}, one always sent", row.wall_ms, row.cpu_ms, row.ratio) for row in more]
    return found + [Listing(row, size) for row, size in zip(renamed, sizes.values(), strict=True)]


def _known(folder: Path, count: int) -> Place:
    """Make a home and a project that know a server with so many tools."""
    place = Place(folder, "")
    (place.project / ".ai").mkdir(parents=True)
    _kiwi(place, "mcp", "add", "many", "--", *STARTED, "--tools", str(count))
    return place


def _prefer(place: Place) -> None:
    _kiwi(place, "prefer", "add", "mcp/many/echo_5")
    kept, until = place.folder / "home" / ".ai" / "state" / "mcp", time.monotonic() + _PATIENCE
    with _served(place) as process:
        _converse(process)
        # A conversation leaves the list for the next one as soon as it has it.
        while not any(kept.glob("tools*.json")) and time.monotonic() < until:
            time.sleep(0.05)


def _kiwi(place: Place, *words: str) -> None:
    subprocess.run(
        [KIWI, *words], cwd=place.project, env=place.environment, capture_output=True, check=True, timeout=120
    )


@contextmanager
def _served(place: Place) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [KIWI, "serve", "--project", str(place.project)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=place.environment,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _converse(process: subprocess.Popen[str], messages: Sequence[dict[str, object]] = HANDSHAKE) -> str:
    """Open a conversation, and return the last answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    answer = ""
    for message in messages:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        if "id" in message and "result" not in json.loads(answer := process.stdout.readline()):
            raise RuntimeError(answer)
    return answer


def _listed(place: Place) -> int:
    with _served(place) as process:
        return len(_converse(process).encode())


def _opened(place: Place) -> Callable[[], None]:
    def turn() -> None:
        with _served(place) as process:
            _converse(process)

    return turn
