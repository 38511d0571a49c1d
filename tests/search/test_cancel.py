"""An interruptible encoder stops between two texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kiwi_mcp.search.encoder import CancellableEncoder, EncodingCancelled
from kiwi_mcp.search.port import Floats


class Noting:
    """An encoder for tests, which notes each text."""

    name, dimension = "noting", 3

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> Floats:
        self.texts += texts
        return np.full((len(texts), 3), len(self.texts), np.float32)


def test_the_wrapper_gives_the_vectors_of_the_encoder() -> None:
    encoder = CancellableEncoder(Noting(), lambda: False)
    assert (encoder.name, encoder.dimension) == ("noting", 3)
    assert encoder.encode(["a", "b"]).tolist() == [[1, 1, 1], [2, 2, 2]]


def test_encoding_stops_between_two_texts() -> None:
    noting = Noting()
    with pytest.raises(EncodingCancelled):
        CancellableEncoder(noting, lambda: len(noting.texts) == 2).encode(["a", "b", "c", "d"])
    assert noting.texts == ["a", "b"]
