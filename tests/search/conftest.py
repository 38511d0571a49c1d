"""An encoder that counts its calls, and a kernel that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import pytest

from kiwi_mcp.search.encoder import encoder_name
from kiwi_mcp.search.port import Floats

ALIKE = (("invoice", "bill"), ("weather", "forecast"))


class Counting:
    """An encoder for tests, which notes each text: those that hold words that mean the same are near each other."""

    dimension = 384

    def __init__(self) -> None:
        self.name = encoder_name()
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> Floats:
        self.texts += texts
        rows = np.array([_row(text.lower()) for text in texts], np.float32)
        unit: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit


def _row(text: str) -> list[float]:
    noise = np.frombuffer(sha256(text.encode()).digest() * 12, np.uint8).astype(np.float32) / 2_550 - 0.05
    for place, alike in enumerate(ALIKE):
        noise[place] += any(word in text for word in alike)
    return list(noise)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """The encoder of every kernel from here on."""
    counting = Counting()
    monkeypatch.setenv("KIWI_SEARCH", "meaning")
    monkeypatch.setattr("kiwi_mcp.kernel.verbs.search.load_encoder", lambda: counting)
    monkeypatch.setattr("kiwi_mcp.search.recall.load_encoder", lambda: counting)
    return counting
