"""Secrets as lines of a file of variables, and secrets compared, without their values being seen elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kiwi_mcp.primitives.dotenv import parse
from kiwi_mcp.primitives.secrets import Secret


@dataclass(frozen=True, slots=True)
class Added:
    """A file of variables with secrets added to it, and the names of those that were not."""

    data: bytes
    differing: tuple[str, ...]
    """Those that stand in it already, with another value."""
    unwritable: tuple[str, ...]
    """Those whose value cannot be written as one line."""
    written: tuple[str, ...] = ()
    """Those that were added."""


def with_secrets(data: bytes, secrets: Mapping[str, Secret]) -> Added:
    """Return the file with a line for each secret that it does not hold; what it holds stays as it is."""
    present = parse(data.decode("utf-8-sig", errors="replace"))
    missing = {name: _line(name, secret.reveal()) for name, secret in secrets.items() if name not in present}
    gap = b"" if not data or data.endswith(b"\n") else b"\n"
    lines = "".join(missing.values()).encode()
    return Added(
        data + gap + lines if lines else data,
        tuple(name for name, secret in secrets.items() if present.get(name, secret.reveal()) != secret.reveal()),
        tuple(name for name, line in missing.items() if not line),
        tuple(name for name, line in missing.items() if line),
    )


def are_same(one: Secret, other: Secret) -> bool:
    """Whether two secrets have one value."""
    return one.reveal() == other.reveal()


def _line(name: str, value: str) -> str:
    """Return the line that gives a variable its value; empty where no line can."""
    quote = next((mark for mark in ("'", '"') if mark not in value), "")
    return f"{name}={quote}{value}{quote}\n" if quote and value.isprintable() else ""
