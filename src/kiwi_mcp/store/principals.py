"""The names of principals in the store: the owner has a plain name, others a prefix for their login method."""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.store.database import Value, clean

STDIO = "stdio"  # the principal that started the process


def token_principal(name: str, token_id: str) -> str:
    """Return the principal of a token. Another token with the same name is another principal."""
    return f"token:{name}:{token_id}"


def is_token_principal(principal: str) -> bool:
    """Whether a principal is identified by a token."""
    return principal.startswith("token:")


def account_principal(name: str) -> str:
    """Return who an access token of an identity provider stands for."""
    return f"oauth:{name}"


def named(name: str) -> tuple[str, Sequence[Value]]:
    """Return the condition for all actors that people know by a name, and its values."""
    start = clean(token_principal(name, ""))
    values = (clean(name), clean(account_principal(name)), len(start), start)
    return "(actor in (?, ?) or substr(actor, 1, ?) = ?)", values


def is_named(actor: str, name: str) -> bool:
    """Whether people know an actor by a name."""
    return actor in {name, account_principal(name)} or actor.startswith(token_principal(name, ""))
