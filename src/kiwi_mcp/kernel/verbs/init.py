"""init: give a project its `.ai` folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.data import FOLDER
from kiwi_mcp.domain.errors import KiwiError, ProjectPathInvalid
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.threads.instructions import INSTRUCTION_NAMES, instructions_digest
from kiwi_mcp.kernel.verb import AUTHOR, ProjectRequest, Response, verb
from kiwi_mcp.manifest.type_specs import load_type_specs

_IGNORED = "# What Kiwi derives or keeps for this machine alone.\noutputs/\nthreads/\n.trash/\n.staging-*/\n.env\n"
_INSTRUCTIONS = "AGENTS.md"


class InitResponse(Response, frozen=True, kw_only=True):
    """The folder, and what was created in it."""

    status: str
    path: str
    created: list[str]
    message: str
    next: str


@verb("init", access=AUTHOR, is_local=True, everyday="init")
async def init(request: ProjectRequest, context: VerbContext) -> InitResponse:
    """Create the .ai folder of a project."""
    project_ai = context.services.catalogs.space(request.project_path).project_ai
    created = []
    for name in (name for name, home in load_type_specs().folders.items() if not home.is_old):
        folder = project_ai / name
        if not folder.is_dir():
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise ProjectPathInvalid(
                    f"{folder} cannot be made: {error.strerror}.",
                    suggestion="Move away what is in its place, and give yourself write access.",
                ) from error
            created.append(f".ai/{name}/")
    if ignore_derived(project_ai):
        created.append(".ai/.gitignore")
    if _write_instructions(project_ai.parent, context):
        created.append(_INSTRUCTIONS)
    return InitResponse(
        status="created" if created else "present",
        path=str(project_ai),
        created=created,
        message=f"The project has its .ai folder ({len(created)} new).",
        next="`kiwi new NAME --python` writes a first tool, `kiwi help tool` shows all kinds.",
    )


def _write_instructions(project: Path, context: VerbContext) -> bool:
    """Write an `AGENTS.md` with the commands where there is none; if the owner asked for it, models follow it."""
    if context.services.user.parent == project or any(os.path.lexists(project / name) for name in INSTRUCTION_NAMES):
        return False
    data = (FOLDER / "new" / _INSTRUCTIONS).read_bytes()
    try:
        with (project / _INSTRUCTIONS).open("xb") as file:
            file.write(data)
    except OSError:  # a folder that only others may write to has its `.ai` folder all the same
        return False
    if context.is_owner:
        with suppress(KiwiError):  # it is asked about at the first thread
            context.services.provenance.record(
                [instructions_digest(data)], "owner_written", context.services.store.actor.name, replaces=True
            )
    return True


def ignore_derived(project_ai: Path) -> bool:
    """Keep what is derived, and what is for this machine alone, out of git; say whether that was still to be done."""
    ignore = project_ai / ".gitignore"
    if os.path.lexists(ignore):  # a link that leads nowhere would be written through
        return False
    ignore.write_text(_IGNORED, encoding="utf-8")
    return True
