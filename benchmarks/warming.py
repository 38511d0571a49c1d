"""Making sheets beforehand, with all cores, so that a kernel finds every text of its tools worded and encoded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.kernel.searching.cards import card_of
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.search.encoder import load_encoder
from kiwi_mcp.search.index import Index
from kiwi_mcp.search.port import Card, Encoder, Floats, Keep
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.sheets import Sheets
from stocked import Place

_OFFERED: tuple[Source, ...] = ("mcp",)
_STEP = 5.0
_NOISE = 0.02


@dataclass(frozen=True, slots=True)
class Wide:
    """An encoder that uses every core: what one text takes does not depend on its neighbours."""

    inner: Encoder
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(os.cpu_count()))

    @property
    def name(self) -> str:
        """The name of the encoder within."""
        return self.inner.name

    @property
    def dimension(self) -> int:
        """How long its vectors are."""
        return self.inner.dimension

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a row for each text."""
        ways = os.cpu_count() or 1
        shares = [texts[start::ways] for start in range(ways)]
        rows = np.empty((len(texts), self.dimension), np.float32)
        for start, found in enumerate(self.threads.map(self.inner.encode, shares)):
            rows[start::ways] = found
        return rows


@dataclass(slots=True)
class Blended:
    """Encodes some texts, and gives any further ones a mixture of theirs: for speed, which no meaning changes."""

    inner: Encoder
    most: int
    known: list[Floats] = field(default_factory=list)
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    @property
    def name(self) -> str:
        """The name of the encoder within: its vectors and these are compared."""
        return self.inner.name

    @property
    def dimension(self) -> int:
        """How long its vectors are."""
        return self.inner.dimension

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a row for each text."""
        if sum(map(len, self.known)) < self.most:
            self.known.append(self.inner.encode(texts))
            return self.known[-1]
        known = np.concatenate(self.known)
        first, second = (known[self.chance.integers(len(known), size=len(texts))] for _ in range(2))
        mixed = first + second + self.chance.normal(0, _NOISE, first.shape).astype(np.float32)
        rows: Floats = mixed / np.linalg.norm(mixed, axis=1, keepdims=True)
        return rows


@dataclass(frozen=True, slots=True)
class Both:
    """What is kept in one place and, where it is missing there, in another; both are given what is new."""

    near: Keep
    far: Keep

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, Kept]:
        """Return what either keeps."""
        near = self.near.read(digests)
        # What was kept without its vector may have been completed elsewhere.
        wanted = [digest for digest in digests if digest not in near or not near[digest].vector]
        far = self.far.read(wanted) if wanted else {}
        if far:
            self.near.write(far)
        return {**near, **far}

    def write(self, kept: Mapping[bytes, Kept]) -> None:
        """Keep it in both."""
        self.near.write(kept)
        self.far.write(kept)


def warm_up(place: Place, *, keep: Path | None = None, encode: int | None = None) -> None:
    """Put the sheets of all that MCP servers offer into the store, from a file of an earlier run or made now.

    `encode` is how many texts are encoded at the most. Nothing is done where there is no encoder: words are quick.
    """
    found = load_encoder()
    if found is None:
        return
    encoder = Blended(Wide(found), encode) if encode else Wide(found)
    cards = [card_of(entry) for entry in place.kernel().catalog().all(_OFFERED)]
    with closing(open_database(default_url(place.space.user))) as store:
        if keep is None:
            _keep(cards, Sheets(store), encoder)
            return
        keep.parent.mkdir(parents=True, exist_ok=True)
        with closing(open_database(f"sqlite:///{keep.absolute()}")) as file:
            _keep(cards, Both(Sheets(store), Sheets(file)), encoder)


def _keep(cards: Sequence[Card], keep: Keep, encoder: Encoder) -> None:
    index = Index(encoder.name)
    index.follow(cards)
    while index.catch_up(keep, encoder, seconds=_STEP):
        done = index.progress
        print(f"{done.encoded:,} of {done.cards:,} tools are encoded", file=sys.stderr)
