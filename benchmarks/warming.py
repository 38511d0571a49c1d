"""Making sheets beforehand, with all cores, so that a kernel finds every text of its tools worded and encoded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.domain.errors import StoreDamaged
from kiwi_mcp.domain.items import Source
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.search.encoder import load_encoder
from kiwi_mcp.search.index import digest_of, pack_vectors, passage_of, words_of
from kiwi_mcp.search.port import Encoder, FeatureStorage, Floats
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.search_index.feature_cache import FeatureCache
from stocked import Place

_OFFERED: tuple[Source, ...] = ("mcp",)
_BATCH = 500
"""How many texts are encoded at a time, and kept before the next: all cores have work, and little is lost."""
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


@dataclass
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
        known = self._joined
        first, second = (known[self.chance.integers(len(known), size=len(texts))] for _ in range(2))
        mixed = first + second + self.chance.normal(0, _NOISE, first.shape).astype(np.float32)
        rows: Floats = mixed / np.linalg.norm(mixed, axis=1, keepdims=True)
        return rows

    @cached_property
    def _joined(self) -> Floats:
        return np.concatenate(self.known)


@dataclass(frozen=True, slots=True)
class Both:
    """What is kept in one place and, where it is missing there, in another; both are given what is new."""

    near: FeatureStorage
    far: FeatureStorage

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, CardFeatures]:
        """Return what either keeps."""
        near = self.near.read(digests)
        # What was kept without its vector may have been completed elsewhere.
        wanted = [digest for digest in digests if digest not in near or not near[digest].vector]
        far = self.far.read(wanted) if wanted else {}
        if far:
            self.near.write(far)
        return {**near, **far}

    def write(self, kept: Mapping[bytes, CardFeatures]) -> None:
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
    cards = [*place.kernel().catalog().all(_OFFERED)]
    with closing(open_database(default_url(place.space.user))) as store:
        if keep is None:
            _keep(cards, FeatureCache(store), encoder)
            return
        with closing(open_kept(keep)) as file:
            _keep(cards, Both(FeatureCache(store), FeatureCache(file)), encoder)


def open_kept(keep: Path) -> Database:
    """Open the file of an earlier run; one that is damaged is made anew."""
    keep.parent.mkdir(parents=True, exist_ok=True)
    url = f"sqlite:///{keep.absolute()}"
    try:
        return open_database(url)
    except StoreDamaged as fault:
        print(f"{keep} is made anew: {fault.message}", file=sys.stderr)
        for ending in ("", "-wal", "-shm"):
            keep.with_name(f"{keep.name}{ending}").unlink(missing_ok=True)
        return open_database(url)


def _keep(cards: Sequence[Card], keep: FeatureStorage, encoder: Encoder) -> None:
    for start in range(0, len(cards), _BATCH):
        by_digest = {digest_of(card, encoder.name): card for card in cards[start : start + _BATCH]}
        known = keep.read([*by_digest])
        new = {digest: card for digest, card in by_digest.items() if not (digest in known and known[digest].vector)}
        if new:
            vectors = pack_vectors(encoder.encode([*map(passage_of, new.values())]))
            sheets = zip(new.items(), vectors, strict=True)
            keep.write({digest: CardFeatures(words_of(card), vector) for (digest, card), vector in sheets})
            print(f"{start + len(by_digest):,} of {len(cards):,} tools are encoded", file=sys.stderr)
