"""The owner's policy: one readable file in the user's space, which nothing but the owner writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.grants import Grant, Rules
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.yaml import read_yaml

FILE_NAME = "policy.yaml"
_RULE_WORDS = {"allow", "deny"}
_WORDS = {"items": _RULE_WORDS, "hosts": _RULE_WORDS, "roots": None, "checkpoint": None}
_CHECKPOINTS = ("auto", "explicit", "disabled")

_Stat = tuple[int, int, int] | None
_read: dict[str, tuple[_Stat, Policy]] = {}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner allows everybody, and the folders of other users that may be projects."""

    grant: Grant = field(default_factory=Grant)
    roots: tuple[Path, ...] = ()
    checkpoint: str = ""
    """When runs that change files get a checkpoint, whatever their items say: `auto`, `explicit` or `disabled`."""


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
        found = os.stat(path)  # noqa: PTH116 - text, as all that is on the way of every call
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(error) from error
    return found.st_mtime_ns, found.st_size, found.st_ino


def _parse(path: Path) -> Policy:
    try:
        value = read_yaml(path.read_text(encoding="utf-8"), what=FILE_NAME).value
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error
    written = as_object(value)
    issues = [*_unknown(written)]
    if value is not None and not isinstance(value, Mapping):
        issues.append(Issue("", "is not a mapping", f"Write words at its top: {', '.join(_WORDS)}."))
    items, hosts, roots = written.get("items"), written.get("hosts"), written.get("roots")
    grant = Grant(
        items=_rules("items", items, issues) if items is not None else Grant().items,
        hosts=_rules("hosts", hosts, issues),
    )
    folders = tuple(Path(text).expanduser() for text in _texts("roots", roots, issues))
    checkpoint = written.get("checkpoint", "")
    if checkpoint and checkpoint not in _CHECKPOINTS:
        issues.append(Issue("checkpoint", "is not a mode", f"Use one of: {', '.join(_CHECKPOINTS)}."))
    # A rule that is misspelt is a rule the owner believes in: refuse, never ignore.
    if issues:
        raise InvalidManifest(f"The owner's {FILE_NAME}", issues)
    return Policy(grant, folders, as_text(checkpoint))


def _unreadable(error: Exception) -> InvalidManifest:
    issue = Issue("", f"cannot be read: {error}", "Make it a text file that you can read.")
    return InvalidManifest(f"The owner's {FILE_NAME}", [issue])


def _unknown(written: JsonObject) -> list[Issue]:
    issues = []
    for word, value in written.items():
        if word not in _WORDS:
            issues.append(Issue(word, "is not a word of the policy", f"Use one of: {', '.join(_WORDS)}."))
            continue
        known = _WORDS[word]
        if known is not None and isinstance(value, Mapping):
            issues += [
                Issue(f"{word}.{inner}", "is not a kind of rule", "Use `allow` or `deny`.")
                for inner in value
                if inner not in known
            ]
    return issues


def _rules(word: str, written: Json, issues: list[Issue]) -> Rules:
    if written is not None and not isinstance(written, Mapping):
        issues.append(Issue(word, "is not a mapping", "Write `allow:` and `deny:` lists below it."))
    rules = as_object(written)
    return Rules(
        allow=_texts(f"{word}.allow", rules.get("allow"), issues),
        deny=_texts(f"{word}.deny", rules.get("deny"), issues),
    )


def _texts(place: str, written: Json, issues: list[Issue]) -> tuple[str, ...]:
    values = as_list(written)
    if (written is not None and not isinstance(written, list)) or not all(isinstance(v, str) for v in values):
        issues.append(Issue(place, "is not a list of words", 'Write it as `["first", "second"]`.'))
    return tuple(value for value in values if isinstance(value, str))
