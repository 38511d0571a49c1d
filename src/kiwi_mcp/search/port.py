"""Search as ports: what is searched, what is kept of it between runs, what turns text into meaning, what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.domain.sheet import Kept

Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Card:
    """An item as a search shows it: enough to choose by, not enough to run."""

    identity: str
    tool_id: str
    name: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    category: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    """Names and descriptions."""
    source: str = ""
    tool_type: str = ""
    path: str = ""
    modified: float = 0.0
    namespace: str = ""
    server: str = ""
    """The MCP server that offers it, if one does."""


class Keep(Protocol):
    """Where that is kept between runs, by the digest of the text. Losing it costs time, and nothing else."""

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, Kept]:
        """Return what is kept under some digests; those that are unknown are left out."""

    def write(self, kept: Mapping[bytes, Kept]) -> None:
        """Keep it; a vector completes what was kept without one."""


class Encoder(Protocol):
    """Turns text into vectors that are near each other where the texts mean the same."""

    @property
    def name(self) -> str:
        """A word that changes whenever the same text would be given another vector."""

    @property
    def dimension(self) -> int:
        """How long its vectors are; the first coordinates say most."""

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a row of length one for each text."""


class Why(NamedTuple):
    """Why a card was found."""

    words: tuple[str, ...] = ()
    """The words of the request that it holds, as they were written."""
    part: str = ""
    """The part of the request that it answers best, where the request has several."""
    meaning: float = 0.0
    """How near it is in meaning, from 0 to 1; 0 where nobody can tell."""
    is_remembered: bool = False
    """Whether it was used after a request like this one."""
    is_exact: bool = False
    """Whether the request is its name."""


_NOTHING = Why()


@dataclass(frozen=True, slots=True)
class Hit:
    """A card that answers a request: how well, from 0 (excluded) to 1, and why."""

    card: Card
    score: float
    why: Why = _NOTHING
