"""The needs that the entry of an MCP server implies: its paths, and what is known of its package."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Needs
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.manifest.mcp.launch_command import server_in
from kiwi_mcp.policy.needs import is_private, placed
from kiwi_mcp.sandbox.command_files import files_of_command, is_in_any, is_too_wide, script_in
from kiwi_mcp.sandbox.levels import base_profile

_DATA = frozenset({".db", ".sqlite", ".sqlite3", ".duckdb", ".jsonl", ".log"})
"""The endings of files that a program changes."""


def needs_named(config: JsonObject, issues: list[Issue], *, server: str = "NAME", project: Path | None = None) -> Needs:
    """Return the needs that the entry of a server implies, and those that are known of it.

    An absolute path is a folder to change or a file to read; of a file that is missing or holds data, the folder around
    it is one to change. A whole home folder is never given, hidden folders of the home only if they are known of the
    server, and to the entry of a `project` nothing outside of it. Each path that is not given is an issue.
    """
    if config.get("transport") != "stdio":
        return Needs()
    argv = (as_text(config.get("command")), *map(text_of, as_list(config.get("args"))))
    spec = ProcessSpec(argv, cwd="/", env={})
    script = script_in(spec)
    named = files_of_command(spec, has_folder=False).named
    read: list[str] = []
    write: list[str] = []
    for folder in (folder for path, around in named.items() if is_private(path) for folder in around):
        if project is None:
            read.append(folder)
        else:
            issues.append(_not_given(folder, server, "read"))
    known = server_in(config)
    # The folders that the table of well-known servers names for it, also as defaults of variables.
    texts = (*known.folders, *known.env.values()) if known else ()
    listed = [str(write_place(path)) for text in texts for path in _paths(text)]
    options = zip(("", *argv), argv, range(len(argv)), strict=False)
    words = [(option, word) for option, word, place in options if place and place != script]
    words += [(name, text_of(value)) for name, value in as_object(config.get("env")).items()]
    words += [("", folder) for folder in known.folders] if known else []
    for name, word in words:
        for path in _paths(word):
            option = word.partition("=")[0] if word.startswith("-") else name
            is_data = path.suffix.lower() in _DATA or (known is not None and option in known.files)
            place = write_place(path) if is_data or not path.exists() else path
            if is_too_wide(place):
                fix = (
                    "Name the folders in it that it needs: `kiwi mcp allow NAME --write FOLDER`."
                    if place == path
                    else f"Move {path.name} to a folder of its own, and change the entry."
                )
                issues.append(Issue("needs", f"{place} is more than a server is given", fix, "warning"))
            elif not base_profile().covers(str(place)):
                access = "write" if place.is_dir() or not place.exists() else "read"
                is_outside = project is not None and not place.is_relative_to(os.path.realpath(project))
                if (is_outside or is_private(str(place))) and not is_in_any(place, listed):
                    issues.append(_not_given(str(place), server, access))
                else:
                    (write if access == "write" else read).append(str(place))
    hosts, sockets = (known.hosts, known.sockets) if known else ((), ())
    if known:
        read += [str(path) for text in known.reads if (path := Path(text).expanduser()).exists()]
    # What lies in a folder that may be changed may be changed too.
    only_read = [path for path in read if not is_in_any(Path(path), write)]
    read_once, write_once, hosts_once = (tuple(dict.fromkeys(texts)) for texts in (only_read, write, hosts))
    return Needs(read_once, write_once, hosts_once, sockets=sockets)


def write_place(path: Path) -> Path:
    """Return the path to give for changing one: a folder, or the folder around a file, where its other files go too."""
    return path if path.is_dir() or (not path.exists() and not path.suffix) else path.parent


def make_folders(needs: Needs, project: Path) -> None:
    """Make the folders that are to be changed and are not there."""
    for text in needs.write:
        path = Path(placed(text, str(project)))
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True) if not path.exists() else None
        except OSError as fault:
            raise InvalidRequest(
                f"{text!r} cannot be made: {fault.strerror}.", suggestion="Make it yourself, or name another folder."
            ) from fault


def _not_given(path: str, server: str, access: str) -> Issue:
    """Return the warning about a path that an entry names and that only the owner can allow."""
    fix = f"If it needs that: `kiwi mcp allow {server} --{access} {shlex.quote(path)}`."
    return Issue("needs", f"{path} is not given to {server} by its entry alone", fix, "warning")


def _paths(word: str) -> Iterator[Path]:
    """Yield the paths in a word, also behind `=`, with links followed; one that is missing counts if it can be made."""
    text = word.rpartition("=")[2] if word.startswith("-") else word
    parts = re.split(r"[:,](?=[/~])", text)
    if "${" in text or not all(part.startswith(("/", "~/")) for part in parts):
        return
    for part in parts:
        try:
            path = Path(os.path.realpath(Path(part).expanduser()))
            if path.is_dir() or path.is_file() or (not path.exists() and _may_be_made(path)):
                yield path
        except (OSError, ValueError, RuntimeError):  # a word that only looks like a path
            continue


def _may_be_made(path: Path) -> bool:
    """Whether a missing path lies in a folder of this user: the home, or one that is narrower than a home."""
    around = next(folder for folder in path.parents if folder.exists())
    is_owners = around == Path(os.path.realpath(Path.home())) or not is_too_wide(around)
    return is_owners and around.is_dir() and os.access(around, os.W_OK) and not base_profile().covers(str(around))
