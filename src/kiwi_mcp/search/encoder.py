"""The meaning half of search: the encoder, where it can be loaded, and if not, why.

Both functions load it at their first call, which takes about a tenth of a second and imports onnxruntime: they are for the first search
and for `doctor`, never for a start. One encoder serves all threads. A request is encoded on the caller's thread, the passages of
cards on a thread in the background; while a text is encoded other Python threads run, and each call uses one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Encoder(Protocol):
    """Texts to vectors of length one: the nearer two are, the more their texts mean the same."""

    @property
    def name(self) -> str:
        """A fingerprint: vectors of another name cannot be compared with these."""

    @property
    def dimension(self) -> int:
        """How long the vectors are."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one row for each text."""


class _Loaded(NamedTuple):
    encoder: Encoder | None
    state: str


_loading = Lock()


def load_encoder() -> Encoder | None:
    """Return the encoder, or None where search has words only."""
    return _loaded().encoder


def encoder_state() -> str:
    """Return which encoder is active, or why there is none."""
    return _loaded().state


def _loaded() -> _Loaded:
    # Two threads that search first at the same time share what one of them loads.
    with _loading:
        return _load()


@cache
def _load() -> _Loaded:
    try:
        encoder: Encoder = import_module("kiwi_mcp.search.minilm").MiniLM()
    except ImportError as error:
        return _Loaded(None, f"words only: `{error.name or 'onnxruntime'}` cannot be imported ({error})")
    except (OSError, ValueError, KeyError) as error:
        return _Loaded(None, f"words only: the encoder cannot be read ({error})")
    return _Loaded(encoder, f"words and meaning ({encoder.name})")
