"""Naming what is here: models do not search for what they do not know to exist, so `search` names the sources."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import as_list, as_object, text_of
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE
from kiwi_mcp.kernel.context.cost import cost_of
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.verbs import Verb
from kiwi_mcp.store.database import within

_LONGEST, _DEAREST = 300, 60
"""How many characters, and about how many tokens, the names may take up in every conversation."""
_SHARE = 3
"""A namespace is asked for less often than a server: of the room, one part in so many is theirs."""
_LONGEST_NAME = 40
_MOST_NAMESPACES = 1_000
_LARGEST = 1_000_000
_ANSWER = 2.0
"""For how many seconds a registry on a server may be silent when it is asked for its namespaces: somebody may wait."""
_SEARCH = "search"
_MARK = ("state", "servers")
"""The file that is another one whenever names may be others: what was kept under an older one is out of date."""
_NAMESPACES = ("state", "namespaces")
"""The file of the registry's namespaces, so that nobody has to open the registry to name them."""


def description_of(verb: Verb, servers: Sequence[str], namespaces: Sequence[str] = ()) -> str:
    """Return what a model is told of a verb, where some servers are installed, and a registry has some namespaces."""
    return f"{verb.description}{_naming(servers, namespaces)}" if verb.name == _SEARCH else verb.description


def mark_changed(user: Path) -> None:
    """Let all who keep a description know that the names in it may be others now."""
    with suppress(OSError):  # where this cannot be written, no description is kept either
        _put(user.joinpath(*_MARK), "")


def namespaces_place(user: Path) -> Path:
    """Return the file that is another one whenever the namespaces of a user's registry are."""
    return user.joinpath(*_NAMESPACES)


def known_namespaces(user: Path) -> Sequence[str]:
    """Return the namespaces of a user's registry as they were noted last, those with most items first."""
    try:
        with namespaces_place(user).open(encoding="utf-8") as file:
            kept = as_object(json.loads(file.read(_LARGEST)))
        is_same = kept.get("registry") == _registry_of(user)
    except (OSError, ValueError, RecursionError, KiwiError):
        return ()
    return [text_of(name) for name in as_list(kept.get("namespaces"))] if is_same else ()


def note_namespaces(user: Path, store: Store) -> None:
    """Note the namespaces of a registry that has changed; one that cannot be asked, or written of, stays as it was."""
    with suppress(KiwiError, OSError), within(_ANSWER):
        found = [name for name in store.registry().namespaces(_MOST_NAMESPACES) if name != BUILTIN_NAMESPACE]
        # Which of them has most items is of little use, and every description would have to be made again for it.
        if {*found} != {*known_namespaces(user)}:
            _put(namespaces_place(user), json.dumps({"registry": _registry_of(user), "namespaces": found}))
            mark_changed(user)


def _registry_of(user: Path) -> str:
    """Return what tells one registry, as one actor sees it, from another; its address may hold a password."""
    settings = registry_settings(user)
    seen = json.dumps([settings.url, settings.actor.name, settings.actor.namespaces])
    return sha256(seen.encode()).hexdigest()


def _put(place: Path, text: str) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = mkstemp(dir=place.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(place)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


def _naming(servers: Sequence[str], namespaces: Sequence[str]) -> str:
    """Return sentences that name servers and namespaces, as many of the first of each as there is room for."""
    published = _fitted(namespaces, _published, _LONGEST // _SHARE, _DEAREST // _SHARE)
    left = _DEAREST - cost_of(published).tokens if published else _DEAREST
    return f"{_fitted(servers, _installed, _LONGEST - len(published), left)}{published}"


def _fitted(names: Sequence[str], sentence: Callable[[str, int], str], longest: int, dearest: int) -> str:
    """Return a sentence with as many names as fit; it is told how many others there are."""
    told = sentence("", len(names)) if names else ""
    for count in range(1, len(names) + 1):
        longer = sentence(", ".join(name[:_LONGEST_NAME] for name in names[:count]), len(names) - count)
        if len(longer) > longest or cost_of(longer).tokens > dearest:
            break
        told = longer
    return told


def _installed(names: str, others: int) -> str:
    if not names:
        return f" {others} MCP servers are installed here."
    return f" Installed here: {names}{f' and {others} more' if others else ''}."


def _published(names: str, others: int) -> str:
    if not names:
        return f" Source registry has {others} namespaces."
    return f" In source registry: {names}{f' and {others} more' if others else ''}."
