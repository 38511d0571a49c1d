"""Folders: those of the user, the cache, and the project, if it may be used."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import ProjectPathInvalid, ProjectPathRequired
from kiwi_mcp.manifest.home_config import usable_config
from kiwi_mcp.policy.policy_files import owner_policy

_KNOWN_KEPT = 256
_NOWHERE = "no_project"
_known: dict[str, tuple[tuple[int, int, int], Path]] = {}
"""Project paths that were permitted, and what each led to then."""
AUDIT_KEY = "state/audit.key"
"""The key of the receipts and of checkpoint records, below the user folder."""


def user_space() -> Path:
    """Return the user's own `.ai` folder: `$USER_SPACE`, else `~/.ai`."""
    named = os.environ.get("USER_SPACE")
    return Path(named).expanduser() if named else Path.home() / ".ai"


def cache_folder() -> Path:
    """Return where derived things are kept, all of which can be deleted."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "kiwi"


def made_private(folder: Path) -> Path:
    """Return a folder that is there and open to its owner alone, as far as that can be had."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    return folder


def nearest_project(start: Path) -> Path:
    """Return the closest folder upwards that has a `.ai` folder, else the start itself."""
    return project_around(start) or start


def usable_project(start: Path) -> Path | None:
    """Return the nearest project, or the start itself; None if that may not be used as a project."""
    folder = nearest_project(start)
    try:
        _permitted(folder, user_space())
    except ProjectPathInvalid:
        return None
    return folder


def project_around(start: Path) -> Path | None:
    """Return the closest folder upwards that has a `.ai` folder which is not the user's own; None without one."""
    user = user_space().resolve()
    for folder in (start, *start.parents):
        if (folder / ".ai").is_dir() and (folder / ".ai").resolve() != user:
            return folder
    return None


def outputs_home(project_ai: Path, user: Path) -> Path:
    """Return the `.ai` folder in which a run leaves its output: the project's, if there is one, else the user's."""
    return project_ai if os.path.isdir(project_ai) else user  # noqa: PTH112 - quicker, on the way of every run


def project_space(asked: str | None, default: Path | None, *, user: Path, cache: Path) -> Space:
    """Return the folders a request sees, with its project path canonical and permitted."""
    if asked is None and default is None:
        raise ProjectPathRequired
    path = Path(asked) if asked is not None else default
    assert path is not None  # noqa: S101 - one of the two is there, as checked above
    chosen = usable_config(user)
    return Space(_permitted(path, user), user, cache, chosen.memory_root, chosen.tool_sources)


def no_project_space(user: Path, cache: Path) -> Space:
    """Return the folders that a request sees which is about no project: an empty one, where it does no harm."""
    folder = cache / _NOWHERE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProjectPathRequired from error
    chosen = usable_config(user)
    return Space(folder, user, cache, chosen.memory_root, chosen.tool_sources)


def has_project(space: Space) -> bool:
    """Whether a request that sees these folders is about a project."""
    return space.project != space.cache / _NOWHERE


def refuse_nowhere(space: Space) -> None:
    """Refuse what can only be done in a project, where none is known."""
    if not has_project(space):
        fault = ProjectPathRequired()
        fault.suggestion = 'Add `project_path: "/absolute/path"`, or say `location: user` where it is to be everywhere.'
        raise fault


def _permitted(path: Path, user: Path) -> Path:
    if "\0" in str(path) or not path.is_absolute():
        raise ProjectPathInvalid(
            f"{str(path)!r} is not an absolute path.", suggestion='Send `project_path: "/absolute/path/to/project"`.'
        )
    known = _known.get(str(path))
    if known is not None and known[0] == folder_identity(str(path)):
        return known[1]
    real = Path(os.path.realpath(path))
    if not os.path.isdir(real):  # noqa: PTH112 - pathlib raises for names that are too long, or not ours to see
        raise ProjectPathInvalid(f"{path} is not a folder.", suggestion="Create the folder, or name one that exists.")
    if real.parent == real:
        raise ProjectPathInvalid(
            "The root of the file system is not a project.", suggestion="Name the project's own folder."
        )
    # A folder of another user may contain tools that act with this user's rights, so the owner must allow it.
    is_own = real.stat().st_uid == os.geteuid()
    if not is_own and not any(real.is_relative_to(os.path.realpath(root)) for root in owner_policy(user).roots):
        raise ProjectPathInvalid(
            f"{real} belongs to another user.",
            suggestion=f"If you trust it, add it to `roots:` in {user / 'policy.yaml'}.",
        )
    identity = folder_identity(str(path))
    # What another user owns is asked about each time, since the owner may take the word back.
    if identity is not None and identity[2] == os.geteuid() and len(_known) < _KNOWN_KEPT:
        _known[str(path)] = (identity, real)
    return real


def folder_identity(path: str) -> tuple[int, int, int] | None:
    """Return the identity of what a path leads to now, following links; None if that cannot be determined."""
    try:
        state = os.stat(path)  # noqa: PTH116 - text, as all that is on the way of every call
    except (OSError, ValueError):
        return None
    return state.st_dev, state.st_ino, state.st_uid
