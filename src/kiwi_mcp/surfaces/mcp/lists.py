"""The list of tools as clients were last given it: where it is kept, and whether it still holds.

Stage one reads it, so nothing is imported here that `json` does not import already.
"""

from __future__ import annotations

import json
import os

from kiwi_mcp import __version__

_LARGEST = 8_000_000
_LONGEST_NAME = 200


def stamp() -> list[int] | None:
    """Return what tells one version of the owner's preferences and servers from another; None without either."""
    seen = [_seen("preferences.yaml"), _seen("state/servers")]
    return [number for one in seen for number in one] if any(map(any, seen)) else None


def _seen(name: str) -> list[int]:
    try:
        state = os.stat(f"{_user()}/{name}")  # noqa: PTH116 - pathlib costs as much as the rest of stage one
    except OSError:
        return [0, 0, 0]
    return [state.st_mtime_ns, state.st_size, state.st_ino]


def recall(project: str) -> dict[str, str]:
    """Return the list by era, if it was made for this project under the stamp that holds now; else nothing."""
    try:
        with open(path_of(project), encoding="utf-8") as file:  # noqa: PTH123 - as above
            kept = json.loads(file.read(_LARGEST))
        tools: dict[str, str] = kept.pop("tools")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    is_sound = type(tools) is dict and all(type(text) is str for text in tools.values())
    return tools if is_sound and kept == conditions(project, stamp()) else {}


def conditions(project: str, made_under: list[int] | None) -> dict[str, object]:
    """Return what has to be the same for a list to hold."""
    return {"version": __version__, "project": _absolute(project), "stamp": made_under}


def path_of(project: str) -> str:
    """Return the file of a project's list, named by the end of its path; whose it is the file says itself."""
    name = os.fsencode(_absolute(project).replace("%", "%25").replace(os.sep, "%2F"))[-_LONGEST_NAME:]
    return f"{_user()}/state/mcp/tools{os.fsdecode(name)}.json"


def _user() -> str:
    """Return the user's own `.ai` folder, as the kernel does."""
    return os.path.expanduser(os.environ.get("USER_SPACE") or "~/.ai")  # noqa: PTH111 - as above


def _absolute(project: str) -> str:
    return os.path.abspath(os.path.expanduser(project)) if project else ""  # noqa: PTH100, PTH111 - as above
