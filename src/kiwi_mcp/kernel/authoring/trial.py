"""Trials: what would be said of a draft, or of a file, if it were an item in its place."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.folder import MANIFESTS, SHARED_CODE
from kiwi_mcp.catalog.read import read_tool
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.kernel.authoring.checking import Verdict, examine
from kiwi_mcp.kernel.authoring.drafts import Draft, write
from kiwi_mcp.kernel.places import refuse_nowhere


async def judge_draft(draft: Draft, source: Source, tool_id: str, catalog: Catalog) -> Verdict:
    """Return every fault of a draft, as if it were in place; nothing of it stays."""
    space = catalog.space
    space.cache.mkdir(parents=True, exist_ok=True)
    trial = Path(tempfile.mkdtemp(prefix="draft-", dir=space.cache))
    try:
        path = write(draft, trial)
        _share_code(space, source, trial)
        tool = _read(path, source, trial, catalog)
        verdict = await examine(tool, catalog)
        return verdict if tool.id == tool_id else verdict.with_issue(_other_name(tool_id, tool.id))
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _share_code(space: Space, source: Source, trial: Path) -> None:
    """Let a draft see the code that the tools of its space share."""
    base = space.user if source == "user" else space.project_ai
    tools = trial / "tools"
    tools.mkdir(exist_ok=True)
    (tools / SHARED_CODE).symlink_to(base / "tools" / SHARED_CODE)


def _read(path: Path, source: Source, base: Path, catalog: Catalog) -> Tool:
    return read_tool(path, source=source, base=base, sheets=catalog.sheets, is_draft=True)


def _other_name(asked: str, found: str) -> Issue:
    return Issue("tool_id", f"the item was asked for as {asked!r} and calls itself {found!r}", "Use one name.")


def read_path(path: Path, catalog: Catalog) -> Tool:
    """Return the item that a path of the project or of the user's space holds, wherever there it lies."""
    manifest = _manifest_at(path, catalog.space)
    homes: tuple[tuple[Source, Path], ...] = (("project", catalog.space.project_ai), ("user", catalog.space.user))
    for source, base in homes:
        if manifest.is_relative_to(base):
            return _read(manifest, source, base, catalog)
    base = manifest.parent.parent if manifest.name in MANIFESTS else manifest.parent
    return _read(manifest, "project", base, catalog)


def _manifest_at(path: Path, space: Space) -> Path:
    """Return the manifest a path names, which must lie in the project or the user's space."""
    if "\0" in str(path):
        raise InvalidRequest("A path cannot hold a NUL character.", suggestion="Check the path.")
    if not path.is_absolute():
        refuse_nowhere(space)
    real = Path(os.path.realpath(path if path.is_absolute() else space.project / path))
    if not (real.is_relative_to(space.project) or real.is_relative_to(os.path.realpath(space.user))):
        raise InvalidRequest(
            f"{path} lies outside the project and the user's space.", suggestion="Name a path inside one of them."
        )
    if os.path.isdir(real):  # noqa: PTH112 - pathlib raises for names that are too long
        found = [real / name for name in MANIFESTS if (real / name).is_file()]
        if not found:
            raise NotFound(f"{path} holds no tool.yaml.", suggestion="Name a tool's folder, or a single file.")
        return found[0]
    if not os.path.exists(real):  # noqa: PTH110 - pathlib raises for names that are too long
        raise NotFound(f"{path} does not exist.", suggestion="Check the path.")
    return real
