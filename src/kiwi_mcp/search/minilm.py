"""The sentence encoder that ships with Kiwi: all-MiniLM-L6-v2 in bytes, run by onnxruntime on one thread.

Importing this takes onnxruntime, so nothing does but `load_encoder` of `search/encoder.py`, at the first search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime  # type: ignore[import-untyped]  # it ships no types
from numpy.typing import NDArray

from kiwi_mcp.search.wordpiece import WordPieces

HOME: Final = Path(__file__).parent.parent / "data" / "encoder"


class Damaged(Exception):
    """A file of the encoder is not the one that was shipped."""


class MiniLM:
    """Texts to unit vectors.

    Texts go through one at a time: padding them to a common length costs more than it saves here, and the scales of
    the bytes are found per run, so that a text's vector would depend on its neighbours. Any number of threads may encode at once;
    each uses one core, and other Python threads run meanwhile.
    """

    def __init__(self, home: Path = HOME) -> None:
        facts = json.loads((home / "encoder.json").read_bytes())
        model, vocabulary = (_whole(home / name, facts["sha256"][name]) for name in ("model.onnx", "vocabulary.txt"))
        self.dimension: int = facts["dimension"]
        self.name: str = f"{facts['name']}-{facts['sha256']['model.onnx'][:12]}"
        self._pieces = WordPieces(vocabulary.decode().split("\n"))
        self._session = onnxruntime.InferenceSession(model, _options(), providers=["CPUExecutionProvider"])

    def encode(self, texts: Sequence[str], *, most: int = 256) -> NDArray[np.float32]:
        """Return one row of length one for each text, of which at most so many pieces are read."""
        rows = np.empty((len(texts), self.dimension), np.float32)
        for row, text in zip(rows, texts, strict=True):
            pieces = np.array(self._pieces.numbers(text, most=most), np.int64)
            row[:] = self._session.run(None, {"pieces": pieces})[0]
        return rows


def _whole(path: Path, expected: str) -> bytes:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != expected:
        raise Damaged(f"`{path.name}` is not the file that was shipped")
    return content


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options
