"""The types of search: what it is given (`CardSource`, `Encoder`, `FeatureStorage`) and what it returns (`Hit`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.registry import VersionInfo
from kiwi_mcp.store.registry.registry import Registry

Floats: TypeAlias = NDArray[np.float32]


class PublishedItems(Struct, frozen=True):
    """A registry that is searched, and which of its versions a search may show."""

    registry: Registry
    is_listed: Callable[[VersionInfo], bool]


class CardSource(Protocol):
    """One source of a catalog. Sources of one name and one home hold the same cards."""

    @property
    def name(self) -> str:
        """The name of the source."""

    @property
    def home(self) -> str:
        """Where the source is."""

    @property
    def cache(self) -> Path:
        """The folder in which its index may be saved."""

    @property
    def owner(self) -> object:
        """The object that lists the source; the index exists as long as an owner does."""

    def etag(self) -> str:
        """Return a text that changes with the cards and is the same in every process; empty if unknown."""

    def generation(self) -> tuple[int, ...]:
        """Return numbers that change with the cards."""

    def cards(self) -> Sequence[Card]:
        """Return all cards; the same object as long as nothing changes."""

    def published(self) -> PublishedItems | None:
        """Return the registry that holds the items, if they are published and the registry can be opened."""


class FeatureStorage(Protocol):
    """A cache of features by the digest of the text. Losing it costs time, and nothing else."""

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, CardFeatures]:
        """Return the features with some digests; unknown digests are left out."""

    def write(self, features: Mapping[bytes, CardFeatures]) -> None:
        """Store features; a vector completes features that were stored without one."""


class Encoder(Protocol):
    """Turns texts into vectors; texts with similar meanings get vectors that are near each other."""

    @property
    def name(self) -> str:
        """A name that changes whenever the same text would get another vector."""

    @property
    def dimension(self) -> int:
        """The length of its vectors; the first coordinates matter most."""

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a row of length one for each text."""


class MatchReason(NamedTuple):
    """Why a card was found."""

    words: tuple[str, ...] = ()  # the words of the query that it holds, as they were written
    part: str = ""  # the part of the query that it matches best, if the query has several
    meaning: float = 0.0  # how near it is in meaning, from 0 to 1; 0 if unknown
    is_recalled: bool = False  # whether it was used after a similar query
    is_exact: bool = False  # whether the query is its name


_NOTHING = MatchReason()


class Hit(Struct, frozen=True):
    """A card that matches a query: its score, from 0 (excluded) to 1, and why it was found."""

    card: Card
    score: float
    why: MatchReason = _NOTHING


class Filter(Struct, frozen=True):
    """Which cards a search returns; an empty field does not filter."""

    types: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()

    def keeps(self, card: Card) -> bool:
        """Whether a card has one of the values of each field; a category covers the categories below it."""
        named = ((card.tool_type, self.types), (card.source, self.sources), (card.server, self.servers))
        return (
            all(not wanted or value in wanted for value, wanted in named)
            and (not self.tags or not {*self.tags}.isdisjoint(card.tags))
            and (not self.categories or any(f"{card.category}/".startswith(f"{word}/") for word in self.categories))
        )


def sort_hits(hits: Sequence[Hit], sort_by: str) -> Sequence[Hit]:
    """Return hits in the requested order; equal ones stay best first."""
    orders: Mapping[str, Callable[[Hit], float | tuple[str, ...]]] = {
        "score": lambda hit: -hit.score,
        "date": lambda hit: -hit.card.modified,
        "name": lambda hit: (hit.card.tool_id, hit.card.identity),
    }
    if sort_by not in orders:
        raise InvalidRequest(
            f"`sort_by` is {sort_by!r}, which is not an order.", suggestion=f"Use one of: {', '.join(orders)}."
        )
    return sorted(hits, key=orders[sort_by])
