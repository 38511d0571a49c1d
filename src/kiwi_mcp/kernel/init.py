"""Init: a project gets its `.ai` folder."""

from __future__ import annotations

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.json import JsonObject

_FOLDERS = ("tools", "directives", "knowledge")
_IGNORED = "# What Kiwi derives or keeps for this machine alone.\noutputs/\n.trash/\n.staging-*/\n.env\n"


def lay_out(space: Space) -> JsonObject:
    """Create the folders that are missing, and nothing that is there already."""
    made = []
    for name in _FOLDERS:
        folder = space.project_ai / name
        if not folder.is_dir():
            folder.mkdir(parents=True)
            made.append(f".ai/{name}/")
    ignore = space.project_ai / ".gitignore"
    if not ignore.exists():
        ignore.write_text(_IGNORED, encoding="utf-8")
        made.append(".ai/.gitignore")
    return {
        "status": "created" if made else "present",
        "path": str(space.project_ai),
        "created": made,
        "message": f"The project has its .ai folder ({len(made)} new).",
        "next": "Put a tool into .ai/tools/, or run `kiwi create`; `kiwi help tool` shows how.",
    }
