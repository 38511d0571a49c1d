"""The owner's policy: one readable file in the user's space, which nothing but the owner writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISLNK

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.grants import OWNER_POLICY, Grant, Rules
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.manifest.yaml import read_yaml
from kiwi_mcp.policy.rules import WORDS, read_grant, texts, unknown_words

FILE_NAME = OWNER_POLICY
_WORDS = (*WORDS, "roots", "checkpoint", "actors")
_CHECKPOINTS = ("auto", "explicit", "disabled")

_Stat = tuple[int, int, int] | None
_read: dict[str, tuple[_Stat, Policy]] = {}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner allows everybody and each, and the folders of other users that may be projects."""

    grant: Grant = field(default_factory=Grant)
    roots: tuple[Path, ...] = ()
    checkpoint: str = ""
    """When runs that change files get a checkpoint, whatever their items say: `auto`, `explicit` or `disabled`."""
    actors: Mapping[str, Grant] = field(default_factory=dict)
    """What else has a say where somebody of that name calls."""


def owner_policy(user: Path) -> Policy:
    """Return the policy of a user space; read again only when the file changed."""
    path = f"{user}/{FILE_NAME}"
    stat = _stat(path)
    known = _read.get(path)
    if known is None or known[0] != stat:
        known = _read[path] = (stat, _parse(Path(path)) if stat else Policy())
    return known[1]


def _stat(path: str) -> _Stat:
    try:
        found = os.lstat(path)
        if S_ISLNK(found.st_mode):
            found = _behind(path)
    except (FileNotFoundError, NotADirectoryError):
        return None  # where there is no space, there is no policy in it
    except OSError as error:
        raise _unreadable(error) from error
    return found.st_mtime_ns, found.st_size, found.st_ino


def _behind(path: str) -> os.stat_result:
    """Return what a link leads to; one to nothing may be the owner's policy on a disk that is not there."""
    try:
        return os.stat(path)  # noqa: PTH116 - text, as all that is on the way of every call
    except OSError as error:
        raise _unreadable(error) from error


def _parse(path: Path) -> Policy:
    try:
        value = read_yaml(path.read_text(encoding="utf-8"), what=FILE_NAME).value
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error
    written = as_object(value)
    issues = [*unknown_words(value, _WORDS, "")]
    grant = read_grant(written, FILE_NAME, "", issues, Grant())
    folders = tuple(Path(text).expanduser() for text in texts("roots", written.get("roots"), issues))
    actors = _actors(written.get("actors"), issues)
    checkpoint = written.get("checkpoint", "")
    if checkpoint and checkpoint not in _CHECKPOINTS:
        issues.append(Issue("checkpoint", "is not a mode", f"Use one of: {', '.join(_CHECKPOINTS)}."))
    # A rule that is misspelt is a rule the owner believes in: refuse, never ignore.
    if issues:
        raise InvalidManifest(f"The owner's {FILE_NAME}", issues)
    return Policy(grant, folders, as_text(checkpoint), actors)


def _actors(written: Json, issues: list[Issue]) -> Mapping[str, Grant]:
    if written is not None and not isinstance(written, Mapping):
        issues.append(Issue("actors", "is not a mapping", "Write the name of a token, and its rules below it."))
    return {name: _actor(name, rules, issues) for name, rules in as_object(written).items()}


def _actor(name: str, written: Json, issues: list[Issue]) -> Grant:
    place = f"actors.{name}"
    issues += unknown_words(written, WORDS, place)
    rules = as_object(written)
    grant = read_grant(rules, f"{FILE_NAME} for {name}", f"{place}.", issues, Grant())
    # What everybody may use is narrowed here: hosts that are listed are all that are left, and what an allow list of
    # items does not name is not for this actor to know of.
    return replace(
        grant,
        is_public="allow" not in as_object(rules.get("hosts")),
        is_secretive="allow" in as_object(rules.get("items")),
        read=_as_above(grant.read, rules, "read"),
        write=_as_above(grant.write, rules, "write"),
    )


def _as_above(found: Rules, written: JsonObject, word: str) -> Rules:
    """Return rules for files that leave to the owner's what they do not speak of, also outside the project."""
    is_said = "allow" in as_object(as_object(written.get("files")).get(word))
    return found if is_said else replace(found, allow=(*found.allow, "/**"))


def _unreadable(error: Exception) -> InvalidManifest:
    issue = Issue("", f"cannot be read: {error}", "Make it a text file that you can read.")
    return InvalidManifest(f"The owner's {FILE_NAME}", [issue])
