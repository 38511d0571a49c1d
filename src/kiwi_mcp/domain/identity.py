"""Identities: who acts, in the words that rules are written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

IdentityKind = Literal["owner", "agent", "service", "thread"]
"""The owner in person, a model or a person at work for them, a program, or a thread that Kiwi runs."""
IDENTITY_KINDS: tuple[IdentityKind, ...] = get_args(IdentityKind)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who acts: a kind, and the name that rules call them by."""

    kind: IdentityKind
    name: str


OWNER = Identity("owner", "")
"""Whoever has started Kiwi themselves: no rules but those for everybody hold for them."""
STRANGER = Identity("agent", "")
"""Somebody of whom nothing is known."""
