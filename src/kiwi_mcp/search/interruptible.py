"""An encoder that can be told to stop: a batch of texts takes part of a second, which nobody should wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kiwi_mcp.search.port import Encoder, Floats


class Stopped(Exception):
    """What was to be encoded is not needed any more."""


@dataclass(frozen=True, slots=True)
class Interruptible:
    """Encodes as another encoder does, and looks up between two texts."""

    inner: Encoder
    is_over: Callable[[], bool]

    @property
    def name(self) -> str:
        """The name of the other."""
        return self.inner.name

    @property
    def dimension(self) -> int:
        """How long its vectors are."""
        return self.inner.dimension

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a row for each text, unless it is over before."""
        rows: list[Floats] = []
        for text in texts:
            if self.is_over():
                raise Stopped
            rows.append(self.inner.encode([text]))
        return np.concatenate(rows)
