"""The sentence encoder that ships with Kiwi: MiniLM, trained further with tools, in bytes, run by onnxruntime.

It is loaded when the first search needs it: onnxruntime takes a moment to import, and may be missing.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import file_digest
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

import kiwi_mcp.data
from kiwi_mcp.search.port import Encoder, Floats

HOME = Path(kiwi_mcp.data.__file__).parent / "encoder"
"""The files that ship with Kiwi; `scripts/make_encoder.py` makes them."""
WIDTH = 384
ROW = np.dtype([("row", "i1", WIDTH), ("scale", "<f4")])
"""What is stored of a word piece: a byte for each coordinate, and the scale of all."""
_loading = Lock()  # threads that search first at the same time share what one of them loads
_LONGEST_WORD = 100
_WHITE = "\t\n\r"
_IDEOGRAPHS = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip
_SPECIAL = ("[UNK]", "[CLS]", "[SEP]")


def load_encoder() -> Encoder | None:
    """Return the encoder, or None where search has words only."""
    with _loading:
        return _load()[0]


@cache
def encoder_name() -> str:
    """Return the name that the encoder has once it is loaded, without loading it; empty if there is none."""
    try:
        facts = json.loads((HOME / "encoder.json").read_bytes())
        return f"{facts['name']}-{facts['fingerprint']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def encoder_state() -> str:
    """Return which encoder is active, or why none is."""
    with _loading:
        return _load()[1]


@cache
def _load() -> tuple[Encoder | None, str]:
    try:
        encoder: Encoder = MiniLM(HOME)
    except ImportError as error:
        return None, f"words only: {error}"
    except Exception as error:  # noqa: BLE001 - on any failure, search uses words alone, and reports it once
        return None, f"words only: the encoder cannot be loaded ({str(error) or repr(error):.200})"
    return encoder, f"words and meaning ({encoder.name})"


class EncodingCancelled(Exception):
    """The result of the encoding is no longer needed."""


class CancellableEncoder:
    """Encodes with another encoder, and checks before each text whether to stop."""

    def __init__(self, inner: Encoder, is_over: Callable[[], bool]) -> None:
        self.name, self.dimension = inner.name, inner.dimension
        self._inner, self._is_over = inner, is_over

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a row for each text; raise `EncodingCancelled` if it is over before."""
        rows: list[Floats] = []
        for text in texts:
            if self._is_over():
                raise EncodingCancelled
            rows.append(self._inner.encode([text]))
        return np.concatenate(rows)


class MiniLM:
    """Turns texts into vectors; threads may share one.

    Texts are encoded one by one. Padding them to a common length costs more than it saves on one core, and the
    quantization scales are found per run, so that the vector of a text would depend on the other texts.
    """

    def __init__(self, home: Path) -> None:
        facts = json.loads((home / "encoder.json").read_bytes())
        for name in ("model.onnx", "vocabulary.txt"):
            with (home / name).open("rb") as file:
                if file_digest(file, "sha256").hexdigest() != facts["sha256"][name]:
                    raise ValueError(f"`{name}` is damaged")
        self.name = f"{facts['name']}-{facts['fingerprint']}"
        self.dimension = WIDTH
        self._longest = int(facts["positions"])
        pieces = (home / "vocabulary.txt").read_bytes().decode().split()
        self._pieces = WordPieces(pieces)
        # Mapped, not read: a text needs a few rows of thirty thousand.
        self._rows = np.load(home / "pieces.npy", mmap_mode="r", allow_pickle=False)
        if self._rows.dtype != ROW or self._rows.shape != (len(pieces),):
            raise ValueError("`pieces.npy` is of another vocabulary")
        self._session = _session(home / "model.onnx")

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a row of length one for each text; only the beginning of a long text counts."""
        vectors = np.empty((len(texts), WIDTH), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            found = self._rows[self._pieces.numbers(text, most=self._longest)]
            vector[:] = self._session.run(None, {"rows": found["row"] * found["scale"][:, None]})[0]
        return vectors


def _session(model: Path) -> Any:  # onnxruntime ships no types
    onnxruntime = import_module("onnxruntime")  # it may be missing
    options = onnxruntime.SessionOptions()
    # More threads would wait for each other in a loop, which is slow on a busy machine.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors share no class of their own
        raise ValueError(f"onnxruntime {onnxruntime.__version__} refuses it: {error}") from error


class WordPieces:
    """Splits a text into the numbered word pieces that the encoder was trained on.

    Lower case, accents removed, punctuation and Chinese characters apart, then each word as the longest pieces of the
    vocabulary. Special tokens such as `[SEP]` in a text are plain text.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._numbers = dict(zip(vocabulary, range(len(vocabulary)), strict=True))
        self._unknown, self._first, self._last = (self._numbers[mark] for mark in _SPECIAL)
        self._known = lru_cache(maxsize=65_536)(self._cut)

    def numbers(self, text: str, *, most: int) -> list[int]:
        """Return the numbers of a text's pieces between those of its start and its end, at most `most` in all."""
        numbers = [self._first]
        # A longer word is unknown, so the rest would not be used.
        for word in pretokenize(text[: most * _LONGEST_WORD]):
            numbers += self._known(word)
            if len(numbers) >= most:
                break
        return [*numbers[: most - 1], self._last]

    def _cut(self, word: str) -> tuple[int, ...]:
        if len(word) > _LONGEST_WORD:
            return (self._unknown,)
        pieces: list[int] = []
        rest, mark = word, ""
        while rest:
            sizes = range(len(rest), 0, -1)
            size = next((size for size in sizes if mark + rest[:size] in self._numbers), 0)
            if not size:
                return (self._unknown,)
            pieces.append(self._numbers[mark + rest[:size]])
            rest, mark = rest[size:], "##"
        return tuple(pieces)


def pretokenize(text: str) -> list[str]:
    """Return the words of a text and its punctuation, in order."""
    return unicodedata.normalize("NFD", text).translate(_spelling).split()


class _Spelling(dict[int, str]):
    """The spelling of each character, computed when it is first used."""

    def __missing__(self, code: int) -> str:
        char, category = chr(code), unicodedata.category(chr(code))
        if char in _WHITE or category.startswith("Z"):
            spelt = " "
        elif category.startswith("C") or category == "Mn" or char == "\ufffd":
            spelt = ""
        else:
            is_ideograph = any(first <= code <= last for first, last in _IDEOGRAPHS)
            is_apart = category.startswith("P") or (char.isascii() and not char.isalnum()) or is_ideograph
            spelt = f" {char} " if is_apart else char.lower()
        # With a limit: a text could hold every character of Unicode.
        if len(self) < 65_536:  # noqa: PLR2004 - about the number of characters in use
            self[code] = spelt
        return spelt


_spelling = _Spelling()
