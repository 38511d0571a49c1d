"""Needs: what of the owner's an item asks for, as its author declared it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object

WORDS = ("read", "write", "hosts", "commands")


@dataclass(frozen=True, slots=True)
class Needs:
    """The files, hosts and programs that an item cannot do without. What is not declared is not given."""

    read: tuple[str, ...] = ()
    """Files and folders to see: below the project, or absolute, or below `~/`. A folder is all that lies in it."""
    write: tuple[str, ...] = ()
    """Files and folders to change, which are seen too."""
    hosts: tuple[str, ...] = ()
    """Hosts to reach, as `Jail.hosts` has them."""
    commands: tuple[str, ...] = ()
    """Programs that it starts."""

    @classmethod
    def from_json(cls, written: Json) -> Needs:
        """Return the needs that are written under `needs` in a manifest; what is not a list of texts counts as none."""
        words = as_object(written)
        return cls(*(tuple(text for text in as_list(words.get(word)) if isinstance(text, str)) for word in WORDS))

    def to_json(self) -> JsonObject:
        """Return the needs as they are shown, without what is empty."""
        return {word: list(asked) for word in WORDS if (asked := getattr(self, word))}


def together(needs: Iterable[Needs]) -> Needs:
    """Return the needs of several items at once."""
    all_of = tuple(needs)
    return Needs(*(tuple(dict.fromkeys(text for one in all_of for text in getattr(one, word))) for word in WORDS))
