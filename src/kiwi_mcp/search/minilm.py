"""The sentence encoder that ships with Kiwi: MiniLM, taught with tools, in bytes, run by onnxruntime.

Search gets it from `load_encoder`, which imports this module late: onnxruntime takes a moment, and may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import file_digest
from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]  # it ships no types

from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.wordpiece import WordPieces

HOME = Path(__file__).parent.parent / "data" / "encoder"
"""The files that ship with Kiwi; `scripts/make_encoder.py` makes them."""

WIDTH = 384
ROW = np.dtype([("row", "i1", WIDTH), ("scale", "<f4")])
"""What is known of a piece by itself: a byte for each coordinate, and the scale of all."""


class MiniLM:
    """Turns texts into vectors; threads may share one.

    Texts go through one by one. Filling them up to a common length costs more than it saves on one core, and the scales
    of the bytes are found per run, so that the vector of a text would depend on its neighbours.
    """

    def __init__(self, home: Path) -> None:
        facts = json.loads((home / "encoder.json").read_bytes())
        model, vocabulary = (_whole(home / name, facts["sha256"][name]) for name in ("model.onnx", "vocabulary.txt"))
        self.name = f"{facts['name']}-{facts['fingerprint']}"
        self.dimension = WIDTH
        self._longest = int(facts["positions"])
        pieces = vocabulary.read_bytes().decode().split()
        self._pieces = WordPieces(pieces)
        # Read as it is needed: a text takes a few rows of thirty thousand.
        self._rows = np.load(home / "pieces.npy", mmap_mode="r", allow_pickle=False)
        if self._rows.dtype != ROW or self._rows.shape != (len(pieces),):
            raise ValueError("`pieces.npy` is of another vocabulary")
        self._session = _session(model)

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a row of length one for each text; of a long one the beginning counts."""
        vectors = np.empty((len(texts), WIDTH), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            found = self._rows[self._pieces.numbers(text, most=self._longest)]
            vector[:] = self._session.run(None, {"rows": found["row"] * found["scale"][:, None]})[0]
        return vectors


def _whole(path: Path, sha256: str) -> Path:
    with path.open("rb") as file:
        if file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError(f"`{path.name}` is damaged")
    return path


def _session(model: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    # More threads would wait for each other in a loop, and make a request slow where others have work too.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors share no class of their own
        raise ValueError(f"onnxruntime {onnxruntime.__version__} does not take it: {error}") from error
