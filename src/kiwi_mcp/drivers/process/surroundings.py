"""What a process finds around it: its variables, and where programs are looked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import CommandMissing
from kiwi_mcp.drivers.process.environments import Environment
from kiwi_mcp.drivers.words import Words
from kiwi_mcp.primitives.program import search_path

_FOUND_KEPT = 1_000
_found: dict[tuple[str, str], str] = {}


def base_env(chain: Chain, space: Space, environment: Environment) -> Mapping[str, str]:
    """Return the variables every process gets; no other one is inherited."""
    return {
        "PATH": search_path(environment.bin),
        "HOME": os.environ.get("HOME") or str(Path.home()),
        "LANG": "C.UTF-8",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),  # noqa: S108 - where temporary files usually are
        "USER": os.environ.get("USER", ""),
        "KIWI_PROJECT": str(space.project),
        "KIWI_TOOL_ID": chain.tool.id,
    }


def find_program(command: str, words: Words, environment: Environment) -> str:
    """Return the path of a program: of the environment, absolute as written, or on the PATH."""
    if command in environment.programs:
        return environment.programs[command]
    found = _on_path(command, search_path(environment.bin)) if _is_plain(command) else None
    if found is None and words.shell and os.access(words.shell, os.X_OK):
        found = words.shell
    if found is None:
        raise CommandMissing(command, needed_by=words.runtime_id, install=words.install)
    return found


def _on_path(command: str, path: str) -> str | None:
    """Return where a program is; a place that was found once is only looked at again."""
    known = _found.get((command, path))
    if known is None or not os.access(known, os.X_OK):
        known = shutil.which(command, path=path)
        if known is not None and len(_found) < _FOUND_KEPT:
            _found[command, path] = known
    return known


def _is_plain(command: str) -> bool:
    # A name, or an absolute path; a relative path would mean a file of the project.
    return bool(command) and ("/" not in command or command.startswith("/"))
