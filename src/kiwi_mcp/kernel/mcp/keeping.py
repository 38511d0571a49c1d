"""Keeping the secrets of servers: written into the owner's own file of variables, or told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.kernel.delivery import held
from kiwi_mcp.kernel.mcp.importing import Wish
from kiwi_mcp.kernel.private_file import changing
from kiwi_mcp.kernel.requests import McpRequest
from kiwi_mcp.primitives import dotenv
from kiwi_mcp.primitives.secret_lines import with_secrets
from kiwi_mcp.primitives.secrets import Secret, Variables

_HOW = "Set them, or say `with_secrets` (`--with-secrets`) to have them written into the user's .env."


@dataclass(frozen=True, slots=True)
class Kept:
    """What came of secrets: where they were written, which of them were, and what the owner must know."""

    path: Path
    written: AbstractSet[str] = frozenset()
    issues: tuple[Issue, ...] = ()


def keep(wishes: Sequence[Wish], request: McpRequest, space: Space) -> Kept:
    """Write the secrets among the words of servers where that was asked, and tell of them otherwise.

    Of servers that are here already, only what is set nowhere is told of.
    """
    path = space.user / ".env"
    secrets = {name: value for wish in wishes for name, value in wish.secrets.items()}
    if request.with_secrets and not request.dry_run:
        return _write(secrets, path) if secrets else Kept(path)
    issues = []
    for wish in wishes:
        names = _unset(wish.secrets, space) if wish.is_here else list(wish.secrets)
        if names:
            held_what = f"{', '.join(names)} held {'secrets' if len(names) > 1 else 'a secret'}"
            issues.append(Issue(wish.tool_id, f"{held_what}, which is not in the manifest", _HOW, "warning"))
    return Kept(path, issues=tuple(issues))


def _unset(secrets: Mapping[str, Secret], space: Space) -> list[str]:
    found = Variables().locate(tuple(secrets), project=space.project, user=space.user)
    stored = held(tuple(secrets), space.user)
    return [name for name in secrets if found.get(name) is None and name not in stored]


def _write(secrets: Mapping[str, Secret], path: Path) -> Kept:
    with changing(path) as put:
        dotenv.read(path)  # refuses what is no text file of the owner's
        data = path.read_bytes() if path.exists() else b""
        added = with_secrets(data, secrets)
        if added.data != data:
            put(added.data)
            path.chmod(0o600)
    differing = (
        Issue(name, f"is in {path} with another value", "Decide which one holds.", "warning")
        for name in added.differing
    )
    unwritable = (
        Issue(name, "cannot be written as one line", f"Set {name} yourself.", "warning") for name in added.unwritable
    )
    return Kept(path, frozenset(added.written), (*differing, *unwritable))
