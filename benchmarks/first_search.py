"""Searches once and then again in a new process, and prints what that took, as JSON.

Usage: first_search.py [--words] HOME REQUEST
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from stocked import Place, opened

_HEAVY = ("numpy", "onnxruntime")
"""What only searches need."""


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1_000_000


def main() -> None:
    """Print the figures of one process."""
    *options, home, need = sys.argv[1:]
    if "--words" in options:
        sys.modules["onnxruntime"] = None  # type: ignore[assignment] # which is how Python says that it is not there
    with opened(Place(Path(home)), {}) as desk:
        desk.greet()
        loaded, before = [name for name in _HEAVY if sys.modules.get(name)], _resident_mb()
        took = []
        for _ in range(2):
            began = time.perf_counter()
            desk.answer(need, 10)
            took.append((time.perf_counter() - began) * 1_000)
        response = {"loaded": loaded, "first_ms": took[0], "next_ms": took[1]}
        print(json.dumps({**response, "before_mb": before, "after_mb": _resident_mb()}))


if __name__ == "__main__":
    main()
