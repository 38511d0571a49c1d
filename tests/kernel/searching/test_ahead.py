"""The encoder has a head start at the first search, where the owner wants it, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kiwi_mcp.kernel.searching.ahead import half_of
from kiwi_mcp.kernel.store import Store

FIRST = """
import asyncio, sys, threading
from pathlib import Path
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.searching import ahead

begun = []
load = ahead._load
ahead._load = lambda: (begun.append("numpy" in sys.modules), load())
home = Path(sys.argv[1])


async def ask() -> None:
    kernel = Kernel(home / "project", user=home / "user", cache=home / "cache")
    for _ in range(2):
        answer = await kernel.call("search", {"query": "send a letter"}, Caller(is_owner=True))
        assert not answer.is_error, answer.content
    await kernel.aclose()


asyncio.run(ask())
print(begun, "onnxruntime" in sys.modules)
"""


@pytest.mark.parametrize(("half", "told"), [("meaning", "[False] True"), ("words", "[] False")])
def test_the_encoder_is_begun_once_and_before_all_else_unless_words_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str, told: str
) -> None:
    (tmp_path / "project" / ".ai").mkdir(parents=True)
    monkeypatch.setenv("KIWI_SEARCH", half)
    command = [sys.executable, "-c", FIRST, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == told


@pytest.mark.parametrize(("named", "half"), [("", "words"), ("bogus", "words"), ("meaning", "meaning")])
def test_a_variable_that_names_no_half_counts_as_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, half: str
) -> None:
    (tmp_path / "registry.yaml").write_text("search: words\n")
    monkeypatch.setenv("KIWI_SEARCH", named)
    assert half_of(Store(tmp_path)) == half
