"""The meaning half of search: its encoder, where it can be loaded, and if not, why.

`load_encoder` and `encoder_state` load it when first called, which imports onnxruntime and takes about a tenth of a
second: they are for the first search and for `doctor`, never for a start. One encoder serves all threads. A request is
encoded on the thread of its caller, the passages of cards on one in the background: meanwhile other Python threads run.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kiwi_mcp.search.port import Encoder

_FACTS = Path(__file__).parent.parent / "data" / "encoder" / "encoder.json"
_loading = Lock()


class _Loaded(NamedTuple):
    encoder: Encoder | None
    state: str


def load_encoder() -> Encoder | None:
    """Return the encoder, or None where search has words only."""
    return _loaded().encoder


@cache
def encoder_name() -> str:
    """Return the name that the encoder has once it is loaded, without loading it; empty where there is none."""
    try:
        facts = json.loads(_FACTS.read_bytes())
        return f"{facts['name']}-{facts['fingerprint']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def encoder_state() -> str:
    """Return which encoder is active, or why none is."""
    return _loaded().state


def _loaded() -> _Loaded:
    # Threads that search first at the same time share what one of them loads.
    with _loading:
        return _load()


@cache
def _load() -> _Loaded:
    try:
        minilm = import_module("kiwi_mcp.search.minilm")
        encoder: Encoder = minilm.MiniLM(minilm.HOME)
    except ImportError as error:
        return _Loaded(None, f"words only: {error}")
    except Exception as error:  # noqa: BLE001 - whatever it is, words are searched without it, and it is told once
        return _Loaded(None, f"words only: the encoder cannot be loaded ({str(error) or repr(error):.200})")
    return _Loaded(encoder, f"words and meaning ({encoder.name})")
