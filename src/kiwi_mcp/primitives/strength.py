"""Which values can be kept as secrets: those that a variable can hold, and that can be told from ordinary text."""

from __future__ import annotations

from dataclasses import dataclass

from kiwi_mcp.primitives.redaction import exempt
from kiwi_mcp.primitives.secrets import Secret

SHORTEST = 8
"""Values of fewer characters occur in ordinary text."""
LONGEST = 65_536
_BUT = "Use a longer one. If it is what it is, say `--weak`: tools may then show it"


@dataclass(frozen=True, slots=True)
class Weakness:
    """Why a value is no good secret, and what to do; an unusable one is none at all."""

    reason: str
    fix: str
    is_unusable: bool = False


def weakness(name: str, secret: Secret) -> Weakness | None:
    """Return what is wrong with a value, which is not quoted; None where it is a good one."""
    value = secret.reveal()
    if not value:
        return Weakness("is empty", "Send it on standard input, or type it when asked.", is_unusable=True)
    if len(value) > LONGEST:
        return Weakness(f"has more than {LONGEST:,} characters", "Keep a file of that size apart.", is_unusable=True)
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        return Weakness("holds what no variable can hold", "Send text; encode bytes as base64.", is_unusable=True)
    if len(value) < SHORTEST:
        return Weakness(f"has fewer than {SHORTEST} characters, and cannot be taken out of what tools say", f"{_BUT}.")
    if exempt({name: value}):
        return Weakness("is too common to be taken out of what tools say", f"{_BUT}.")
    return None
