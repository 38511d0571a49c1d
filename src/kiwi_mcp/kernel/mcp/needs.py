"""What servers need: the paths that their commands name, what the owner says besides, and both as a person reads it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.needs import Needs, together
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.seen import is_too_wide, script_in, seen_by
from kiwi_mcp.policy.reaching import is_private
from kiwi_mcp.sandbox.profile import base_profile

_WORDS = {"read": "read", "write": "change", "hosts": "reach", "commands": "start"}


def needs_named(config: JsonObject, issues: list[Issue]) -> Needs:
    """Return what a command names by itself: an absolute path that is there, a folder to change, a file to read.

    The file that it runs is seen without being named, unless it is among the hidden folders of the home; and a whole
    home is more than anybody means.
    """
    if config.get("transport") != "stdio":
        return Needs()
    argv = (as_text(config.get("command")), *map(text_of, as_list(config.get("args"))))
    spec = ProcessSpec(argv, cwd="/", env={})
    script = script_in(spec)
    words = [word for place, word in enumerate(argv) if place and place != script]
    values = map(text_of, as_object(config.get("env")).values())
    named = seen_by(spec, has_folder=False).named
    read = [folder for path, around in named.items() if is_private(path) for folder in around]
    write: list[str] = []
    for path in _paths((*words, *values)):
        if is_too_wide(path):
            fix = "Name the folders in it that it needs: `kiwi mcp allow NAME --write FOLDER`."
            issues.append(Issue("needs", f"{path} is more than a server is given", fix, "warning"))
        elif not base_profile().covers(str(path)):
            (write if path.is_dir() else read).append(str(path))
    # What lies in a folder that may be changed may be changed too.
    only_read = [path for path in read if not any(Path(path).is_relative_to(folder) for folder in write)]
    return Needs(read=tuple(dict.fromkeys(only_read)), write=tuple(dict.fromkeys(write)))


def needs_said(read: Sequence[str], write: Sequence[str], hosts: Sequence[str], space: Space) -> Needs:
    """Return what the owner says that a server needs; a path that is not there is refused."""
    return Needs(
        read=tuple(_said(path, space) for path in read),
        write=tuple(_said(path, space) for path in write),
        hosts=tuple(hosts),
    )


def with_needs(manifest: JsonObject, *needs: Needs) -> JsonObject:
    """Return a manifest that declares these needs besides its own."""
    found = together((Needs.from_json(manifest.get("needs")), *needs)).to_json()
    return {**manifest, "needs": found} if found else manifest


def needs_told(needs: Needs) -> str:
    """Return needs in words, for the end of a sentence; nothing where there are none."""
    told = [f"{verb} {', '.join(asked)}" for word, verb in _WORDS.items() if (asked := getattr(needs, word))]
    return f"; it may {' and '.join(told)}" if told else ""


def _paths(words: Iterable[str]) -> Iterator[Path]:
    """Yield the paths that are whole words, or follow on `=` in one, and are there; a link is followed to its end."""
    for word in words:
        text = word.rpartition("=")[2] if word.startswith("-") else word
        if not text.startswith(("/", "~/")) or "${" in text:
            continue
        try:
            path = Path(os.path.realpath(Path(text).expanduser()))
            if path.is_dir() or path.is_file():
                yield path
        except (OSError, ValueError, RuntimeError):  # a word that only looks like a path
            continue


def _said(text: str, space: Space) -> str:
    path = Path(os.path.realpath(space.project / Path(text).expanduser()))
    if any(path.is_relative_to(own.resolve()) for own in (space.cache, space.user)):
        raise InvalidRequest(f"{text!r} is Kiwi's own, and given to nothing.", suggestion="Name a folder of your own.")
    if not path.exists():
        raise InvalidRequest(f"There is no {text!r} to give.", suggestion="Make it first, or name another path.")
    return str(path.relative_to(space.project)) if path.is_relative_to(space.project) else str(path)
