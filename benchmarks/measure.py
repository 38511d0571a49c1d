"""Measuring: every case once a turn, so that a busy machine is busy for all of them; medians, and ratios to a base."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """Something to measure: a name, and one turn of it."""

    name: str
    turn: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """The medians of a case: wall and CPU milliseconds (own and children's), and its ratio to the first case."""

    name: str
    wall_ms: float
    cpu_ms: float
    ratio: float


def interleaved(cases: list[Case], *, turns: int, warm: int = 1) -> list[Measured]:
    """Measure all cases in turns; the first is what the others are compared with."""
    walls: dict[str, list[float]] = {case.name: [] for case in cases}
    cpus: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(warm + turns):
        for case in cases:
            cpu, wall = _cpu(), time.perf_counter()
            case.turn()
            if number >= warm:
                walls[case.name].append((time.perf_counter() - wall) * 1_000)
                cpus[case.name].append((_cpu() - cpu) * 1_000)
    base = statistics.median(walls[cases[0].name])
    return [
        Measured(
            name, statistics.median(walls[name]), statistics.median(cpus[name]), statistics.median(walls[name]) / base
        )
        for name in walls
    ]


def _cpu() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
