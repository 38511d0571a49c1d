"""A sentence encoder of the BERT family in numpy, forwards and backwards: enough to teach it without a framework.

Texts are packed: a batch is one row for each piece of each text, and only attention spreads them out to a common
length. So products, which take most of the time, have no row that is filling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import pi
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = Mapping[str, Floats]
Gradients: TypeAlias = dict[str, Floats]
Back: TypeAlias = Callable[[Floats], Floats]
"""Takes the gradient of what a step gave, notes those of its weights, and returns that of what it was given."""

TINY = np.float32(1e-12)
FAR = np.float32(-1e9)


@dataclass(frozen=True)
class Batch:
    """Some texts, packed: the number of each piece, and where it stands in a table with a row for each text."""

    numbers: NDArray[np.int64]
    places: NDArray[np.int64]
    sizes: NDArray[np.int64]
    longest: int

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> Batch:
        """Pack texts, each given as the numbers of its pieces."""
        longest = max(map(len, texts))
        places = [row * longest + place for row, text in enumerate(texts) for place in range(len(text))]
        sizes = np.array([len(text) for text in texts])
        return cls(np.concatenate([np.array(text) for text in texts]), np.array(places), sizes, longest)

    @property
    def positions(self) -> NDArray[np.int64]:
        """The place of each piece in its text."""
        return self.places % self.longest

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each text begins among the pieces."""
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    def spread(self, rows: Floats) -> Floats:
        """Return rows in a table: text, place, coordinate."""
        table = np.zeros((len(self.sizes) * self.longest, rows.shape[1]), rows.dtype)
        table[self.places] = rows
        return table.reshape(len(self.sizes), -1, rows.shape[1])

    def packed(self, table: Floats) -> Floats:
        """Return the rows of a table."""
        found: Floats = table.reshape(-1, table.shape[-1])[self.places]
        return found


class Bert:
    """The weights, under the names they are published with, and what they make of texts."""

    def __init__(self, weights: Weights, heads: int) -> None:
        self.weights = {name: array.copy() for name, array in weights.items()}
        self._heads = heads
        self._layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))

    def encode(self, texts: Sequence[Sequence[int]]) -> tuple[Floats, Callable[[Floats], Gradients]]:
        """Return a vector of length one for each text, and what makes gradients of weights out of those of vectors.

        What stands before the first layer is not taught: a word that is not among the examples stays what it was.
        """
        batch = Batch.of(texts)
        gradients: Gradients = {}
        state = self._embedded(batch)
        steps: list[Back] = []
        for layer in range(self._layers):
            state, back = self._layer(f"encoder.layer.{layer}.", batch, state, gradients)
            steps.append(back)
        vectors, back = _mean(batch, state)

        def backwards(gradient: Floats) -> Gradients:
            gradient = back(gradient)
            while steps:  # what a step remembers is let go once it is done
                gradient = steps.pop()(gradient)
            return gradients

        return vectors, backwards

    def _embedded(self, batch: Batch) -> Floats:
        known = self.weights
        rows = known["embeddings.word_embeddings.weight"][batch.numbers]
        rows = rows + known["embeddings.position_embeddings.weight"][batch.positions]
        rows = rows + known["embeddings.token_type_embeddings.weight"][0]
        return self._normalised("embeddings.LayerNorm", rows, {})[0]

    def _layer(self, name: str, batch: Batch, state: Floats, gradients: Gradients) -> tuple[Floats, Back]:
        seen, back_seen = self._attention(f"{name}attention.", batch, state, gradients)
        middle, back_middle = self._normalised(f"{name}attention.output.LayerNorm", state + seen, gradients)
        wide, back_wide = self._dense(f"{name}intermediate.dense", middle, gradients)
        bent, back_bent = _gelu(wide)
        narrow, back_narrow = self._dense(f"{name}output.dense", bent, gradients)
        given, back_given = self._normalised(f"{name}output.LayerNorm", middle + narrow, gradients)

        def back(gradient: Floats) -> Floats:
            gradient = back_given(gradient)
            gradient = back_middle(gradient + back_wide(back_bent(back_narrow(gradient))))
            return gradient + back_seen(gradient)

        return given, back

    def _attention(self, name: str, batch: Batch, state: Floats, gradients: Gradients) -> tuple[Floats, Back]:
        made = [self._dense(f"{name}self.{part}", state, gradients) for part in ("query", "key", "value")]
        ask, answer, response = (self._by_head(batch.spread(rows)) for rows, _ in made)
        shrink = np.float32(ask.shape[-1] ** -0.5)
        is_filling = np.arange(batch.longest) >= batch.sizes[:, None]
        scores: Floats = ask @ answer.swapaxes(-1, -2) * shrink
        scores[np.broadcast_to(is_filling[:, None, None, :], scores.shape)] = FAR
        share = _softmax(scores)
        given, back_given = self._dense(f"{name}output.dense", batch.packed(_joined(share @ response)), gradients)

        def back(gradient: Floats) -> Floats:
            above = self._by_head(batch.spread(back_given(gradient)))
            shares = above @ response.swapaxes(-1, -2)
            scored = share * (shares - (shares * share).sum(-1, keepdims=True)) * shrink
            parts = (scored @ answer, scored.swapaxes(-1, -2) @ ask, share.swapaxes(-1, -2) @ above)
            below = [turn(batch.packed(_joined(part))) for (_, turn), part in zip(made, parts, strict=True)]
            return below[0] + below[1] + below[2]

        return given, back

    def _by_head(self, table: Floats) -> Floats:
        texts, places, width = table.shape
        return table.reshape(texts, places, self._heads, width // self._heads).swapaxes(1, 2)

    def _dense(self, name: str, rows: Floats, gradients: Gradients) -> tuple[Floats, Back]:
        matrix = self.weights[f"{name}.weight"]

        def back(gradient: Floats) -> Floats:
            gradients[f"{name}.weight"] = gradient.T @ rows
            gradients[f"{name}.bias"] = gradient.sum(0)
            below: Floats = gradient @ matrix
            return below

        return rows @ matrix.T + self.weights[f"{name}.bias"], back

    def _normalised(self, name: str, rows: Floats, gradients: Gradients) -> tuple[Floats, Back]:
        gain = self.weights[f"{name}.weight"]
        centred = rows - rows.mean(-1, keepdims=True)
        scale = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + TINY)
        even = centred * scale

        def back(gradient: Floats) -> Floats:
            gradients[f"{name}.weight"] = (gradient * even).sum(0)
            gradients[f"{name}.bias"] = gradient.sum(0)
            inner = gradient * gain
            tilt = (inner * even).mean(-1, keepdims=True)
            below: Floats = scale * (inner - inner.mean(-1, keepdims=True) - even * tilt)
            return below

        return even * gain + self.weights[f"{name}.bias"], back


def _gelu(rows: Floats) -> tuple[Floats, Back]:
    """Bend rows, by the formula with a hyperbolic tangent: it differs in the fourth digit, and numpy has it."""
    root, cube = np.float32((2 / pi) ** 0.5), np.float32(0.044715)
    square = rows * rows
    bend = np.tanh(root * rows * (1 + cube * square))

    def back(gradient: Floats) -> Floats:
        slope = root * (1 + 3 * cube * square) * (1 - bend * bend)
        below: Floats = gradient * np.float32(0.5) * (1 + bend + rows * slope)
        return below

    return np.float32(0.5) * rows * (1 + bend), back


def _mean(batch: Batch, state: Floats) -> tuple[Floats, Back]:
    """Return the direction of the mean of each text's rows."""
    sums = np.add.reduceat(state, batch.starts, axis=0)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    vectors: Floats = sums / lengths

    def back(gradient: Floats) -> Floats:
        flat = (gradient - vectors * (gradient * vectors).sum(1, keepdims=True)) / lengths
        return np.repeat(flat, batch.sizes, axis=0)

    return vectors, back


def _softmax(scores: Floats) -> Floats:
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    shares: Floats = raised / raised.sum(-1, keepdims=True)
    return shares


def _joined(table: Floats) -> Floats:
    texts, heads, places, width = table.shape
    return table.swapaxes(1, 2).reshape(texts, places, heads * width)
