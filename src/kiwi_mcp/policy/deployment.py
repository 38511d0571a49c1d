"""Managed deployments: what whoever runs this machine for its owner allows there, beyond which no owner goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.errors import InvalidManifest, PolicyDenied
from kiwi_mcp.domain.grants import Deny, Grant, Rights
from kiwi_mcp.domain.isolation import LEVELS, Level, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import as_object, as_text
from kiwi_mcp.manifest.yaml import read_yaml
from kiwi_mcp.policy.rules import read_grant, unknown_words

SYSTEM_FOLDER = "/etc/kiwi"
_NAME = "deployment.yaml"
_WORDS = ("deployment", "items", "floor")
_KINDS = ("local", "managed")
_Stat = tuple[int, int, int]
_read: dict[Path, tuple[_Stat, Deployment]] = {}


@dataclass(frozen=True, slots=True)
class Deployment:
    """The rules of one file: which items there may be, and how strictly every process is held at least."""

    grant: Grant
    floor: Level | None = None
    is_managed: bool = False


def deployments() -> tuple[Deployment, ...]:
    """Return the deployments that hold on this machine; all of them do, so that a file more only takes away."""
    return tuple(one for path in _files() if (one := _at(path)) is not None and one.is_managed)


def minimum() -> Level | None:
    """Return the least level that every process is held by here; None where nobody sets one."""
    levels = [one.floor for one in deployments() if one.floor is not None]
    return strictest(levels) if levels else None


def deployed(rights: Rights) -> Rights:
    """Return rights in which the deployments of this machine have a say as well."""
    found = deployments()
    return Rights((*rights.grants, *(one.grant for one in found))) if found else rights


def refuse_unlisted(identity: str) -> None:
    """Refuse to bring an item here that a deployment does not list: `SOURCE/NAMESPACE/NAME@VERSION`."""
    for one in deployments():
        match one.grant.verdict("item", identity):
            case Deny(reason=reason, rule=rule):
                raise PolicyDenied(
                    f"This is a managed deployment, and {reason}.",
                    suggestion="Ask whoever runs this machine to add it to its list.",
                    rule=rule,
                    grant=one.grant.name,
                )


def _files() -> Iterator[Path]:
    """Give the file of the machine, and one more that is named, whose rules are added."""
    # On most machines there is not even the folder, and that is quickly seen on the way of every call.
    if os.access(SYSTEM_FOLDER, os.F_OK):
        yield Path(SYSTEM_FOLDER, _NAME)
    if named := os.environ.get("KIWI_DEPLOYMENT"):
        yield Path(named)


def _at(path: Path) -> Deployment | None:
    try:
        found = path.stat()
        stat = found.st_mtime_ns, found.st_size, found.st_ino
        known = _read.get(path)
        if known is None or known[0] != stat:
            known = _read[path] = stat, _parse(path)
    except FileNotFoundError:
        if path == Path(SYSTEM_FOLDER, _NAME) and not path.is_symlink():
            return None
        raise _unreadable(path, "it is not there") from None  # somebody means rules by it
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    return known[1]


def _parse(path: Path) -> Deployment:
    value = read_yaml(path.read_text(encoding="utf-8"), what=path.name).value
    written, issues = as_object(value), [*unknown_words(value, _WORDS, "")]
    kind, floor = written.get("deployment"), written.get("floor")
    if kind not in _KINDS:
        issues.append(Issue("deployment", "does not say which", f"Write one of: {', '.join(_KINDS)}."))
    if floor is not None and floor not in LEVELS:
        issues.append(Issue("floor", "is not a level of isolation", f"Write one of: {', '.join(LEVELS)}."))
    grant = read_grant(written, f"the deployment ({path.name})", "", issues, Grant(is_whole=True))
    if issues:
        raise InvalidManifest(f"The deployment {path}", issues)
    level = next((level for level in LEVELS if level == as_text(floor)), None)
    return Deployment(grant, level, is_managed=kind == "managed")


def _unreadable(path: Path, reason: str) -> InvalidManifest:
    is_named = path != Path(SYSTEM_FOLDER, _NAME)
    fix = "Mend it, or unset KIWI_DEPLOYMENT." if is_named else "Ask whoever runs this machine to mend it."
    issue = Issue("", f"cannot be read: {reason}", fix)
    return InvalidManifest(f"The deployment {path}", [issue])
