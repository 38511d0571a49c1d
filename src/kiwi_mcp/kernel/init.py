"""Init: a project gets its `.ai` folder."""

from __future__ import annotations

import os
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import ProjectPathInvalid
from kiwi_mcp.domain.json import JsonObject

_FOLDERS = ("tools", "directives", "knowledge")
_IGNORED = "# What Kiwi derives or keeps for this machine alone.\noutputs/\n.trash/\n.staging-*/\n.env\n"


def lay_out(space: Space) -> JsonObject:
    """Create the folders that are missing, and nothing that is there already."""
    made = []
    for name in _FOLDERS:
        folder = space.project_ai / name
        if not folder.is_dir():
            _make(folder)
            made.append(f".ai/{name}/")
    if ignore_derived(space.project_ai):
        made.append(".ai/.gitignore")
    return {
        "status": "created" if made else "present",
        "path": str(space.project_ai),
        "created": made,
        "message": f"The project has its .ai folder ({len(made)} new).",
        "next": "Put a tool into .ai/tools/, or run `kiwi create`; `kiwi help tool` shows how.",
    }


def ignore_derived(project_ai: Path) -> bool:
    """Keep what is derived, and what is for this machine alone, out of git; say whether that was still to be done."""
    ignore = project_ai / ".gitignore"
    if os.path.lexists(ignore):  # a link that leads nowhere would be written through
        return False
    ignore.write_text(_IGNORED, encoding="utf-8")
    return True


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ProjectPathInvalid(
            f"{folder} cannot be made: {error.strerror}.",
            suggestion="Move away what is in its place, and give yourself write access.",
        ) from error
