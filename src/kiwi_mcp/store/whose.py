"""Whose a run, a receipt or a task is: the owner's by a plain name, everybody else's by one that says how they came."""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.store.database import Value
from kiwi_mcp.store.plain import clean

STDIO = "stdio"
"""Whoever has started the process."""


def token_principal(name: str, token_id: str) -> str:
    """Return who a token stands for; another token of the same name is somebody else."""
    return f"token:{name}:{token_id}"


def is_token_principal(principal: str) -> bool:
    """Whether somebody is known by a token."""
    return principal.startswith("token:")


def account_principal(name: str) -> str:
    """Return who an access token of an identity provider stands for."""
    return f"oauth:{name}"


def named(name: str) -> tuple[str, Sequence[Value]]:
    """Return the condition for all actors that people know by a name, and its values."""
    start = clean(token_principal(name, ""))
    return "(actor in (?, ?) or substr(actor, 1, ?) = ?)", (
        clean(name),
        clean(account_principal(name)),
        len(start),
        start,
    )


def is_named(actor: str, name: str) -> bool:
    """Whether people know an actor by a name."""
    return actor in {name, account_principal(name)} or actor.startswith(token_principal(name, ""))
