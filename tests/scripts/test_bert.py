"""The training network of the encoder: it matches the encoder, and its gradients are right."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

SCRIPTS = Path(__file__).parents[2] / "scripts"
WIDTH, WIDE, HEADS = 8, 16, 2
TEXTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


@pytest.fixture
def bert(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module("bert")


def named_sizes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embeddings.word_embeddings.weight", (20, WIDTH)
    yield "embeddings.position_embeddings.weight", (9, WIDTH)
    yield "embeddings.token_type_embeddings.weight", (2, WIDTH)
    yield from norm("embeddings.LayerNorm")
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from dense(f"{name}.attention.{part}", WIDTH, WIDTH)
        yield from dense(f"{name}.intermediate.dense", WIDE, WIDTH)
        yield from dense(f"{name}.output.dense", WIDTH, WIDE)
        yield from chain(norm(f"{name}.attention.output.LayerNorm"), norm(f"{name}.output.LayerNorm"))


def dense(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (WIDTH,)
    yield f"{name}.bias", (WIDTH,)


@pytest.fixture
def chance() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def weights(chance: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    return {name: chance.normal(size=size) * 0.4 for name, size in named_sizes(2)}


def test_gradients_match_numerical_slopes(
    bert: ModuleType, weights: dict[str, NDArray[np.float64]], chance: np.random.Generator
) -> None:
    network = bert.Bert(weights, HEADS)
    vectors, backwards = network.encode(TEXTS)
    wish = chance.normal(size=vectors.shape)
    gradients = backwards(wish)
    assert len(gradients) == 32

    for name, gradient in gradients.items():
        place = tuple(int(chance.integers(size)) for size in gradient.shape)
        values = []
        for change in (1e-5, -2e-5, 1e-5):
            network.weights[name][place] += change
            values.append(float((network.encode(TEXTS)[0] * wish).sum()))
        assert gradient[place] == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-3, abs=1e-6), name


def test_a_text_has_the_same_vector_in_any_batch(bert: ModuleType, weights: dict[str, NDArray[np.float64]]) -> None:
    network = bert.Bert(weights, HEADS)

    together = network.encode(TEXTS)[0]

    for text, vector in zip(TEXTS, together, strict=True):
        assert network.encode([text])[0][0] == pytest.approx(vector)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1)
