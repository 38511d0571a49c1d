"""The tally: how large the answers were that models were given, day by day.

It holds sizes and nothing else, on this machine alone, in files that can be deleted at any time. Several processes add
to it at once: each answer is one short line, which the system appends as a whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.answers import Answer
from kiwi_mcp.kernel.context.cost import Cost, cost_of_json

OF_MODELS = frozenset({"mcp", "gateway"})
"""The surfaces whose answers a model reads; a person at a terminal, or a program, has no context to save."""
COUNTED = ("search", "load")
"""The verbs by which a model finds what it was not given."""
DAYS = 30
"""For how many days answers are counted in."""

_SOON, _MOST = 0.5, 16
"""After how many seconds the sizes of answers are added, and how many answers wait for that."""
_FOLDER = "context"
_LARGEST = 65_536
"""How many bytes one day takes at the most; by then its mean is known."""
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Mean(NamedTuple):
    """What an answer costs on average, and of how many answers that is the average."""

    number: int
    cost: Cost

    def to_json(self) -> JsonObject:
        """Return it in words."""
        return {"answers": self.number, **self.cost.to_json()}


class Tally:
    """The answers of one user's kernels, kept in their cache; `surface` is the way that this one's calls come."""

    def __init__(self, cache: Path, surface: str = "") -> None:
        self._folder = cache / _FOLDER
        self._is_read = surface in OF_MODELS
        self._given: list[tuple[str, JsonObject]] = []
        """Answers whose sizes are not added yet: whoever waits for one does not wait for it to be measured."""
        self._giving = Lock()

    def counted(self, verb: str, answer: Answer) -> Answer:
        """Return an answer, whose size is added soon where a model reads it and it is of a kind that is counted."""
        # A page of an output is a part of some result, and tells nothing of what loading costs.
        if self._is_read and verb in COUNTED and not (verb == "load" and "identity" not in answer.content):
            given = (verb, answer.content)
            with self._giving:  # means are asked for in other threads
                self._given.append(given)
            self._settle_soon()
        return answer

    def settle(self) -> None:
        """Add the sizes of all answers that were given."""
        with self._giving:
            given, self._given = self._given, []
        for verb, content in given:
            self._note(verb, content)

    def _settle_soon(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # where there is no loop, nobody waits
            self.settle()
            return
        if len(self._given) == 1:
            loop.call_later(_SOON, self.settle)
        elif len(self._given) >= _MOST:
            self.settle()

    def _note(self, verb: str, content: JsonObject) -> None:
        # Where it cannot be done, nothing is lost but a figure.
        with suppress(OSError, ValueError, TypeError, RecursionError):
            cost = cost_of_json(content)
            self._append(f"{verb} {cost.bytes} {cost.tokens}\n".encode())

    def means(self) -> Mapping[str, Mean]:
        """Return what an answer of each verb cost on average in these days; a verb that nobody used is absent."""
        self.settle()
        sums: dict[str, list[int]] = {}
        for verb, size, tokens in self._lines():
            one = sums.setdefault(verb, [0, 0, 0])
            for at, number in enumerate((1, size, tokens)):
                one[at] += number
        return {
            verb: Mean(count, Cost(round(size / count), round(tokens / count)))
            for verb, (count, size, tokens) in sums.items()
        }

    def _append(self, line: bytes) -> None:
        path = self._folder / datetime.now(UTC).date().isoformat()
        try:
            file = os.open(path, _APPENDING, 0o600)
        except FileNotFoundError:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, _APPENDING, 0o600)
        try:
            size = os.fstat(file).st_size
            if size < _LARGEST:
                os.write(file, line)
        finally:
            os.close(file)
        if size == 0:  # a new day has begun
            for old in self._days()[DAYS:]:
                old.unlink(missing_ok=True)

    def _days(self) -> list[Path]:
        """Return the file of each day, the newest first."""
        try:
            return sorted(self._folder.iterdir(), reverse=True)
        except OSError:
            return []

    def _lines(self) -> Iterator[tuple[str, int, int]]:
        for path in islice(self._days(), DAYS):
            with suppress(OSError), path.open("rb") as file:
                for line in file.read(2 * _LARGEST).decode(errors="replace").splitlines():
                    match line.split():
                        case [verb, size, tokens] if verb in COUNTED and size.isdecimal() and tokens.isdecimal():
                            yield verb, int(size), int(tokens)
