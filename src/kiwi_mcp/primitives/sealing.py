"""How the key of the store of secrets is kept: known by the files that lie beside the store, without opening it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

Seal: TypeAlias = Literal["file", "passphrase", "keyring"]
SEALS: dict[Seal, str] = {"file": "key file", "passphrase": "passphrase", "keyring": "keyring"}
"""The ways to keep the key, and how each is told."""
FILE, DESCRIPTOR = "KIWI_PASSPHRASE_FILE", "KIWI_PASSPHRASE_FD"
"""The variables that say where a passphrase is read from."""
KEY_NAME, ACCOUNT_NAME = "secrets.key", "secrets.keyring"
"""The key itself, and under which name a keyring keeps it."""
SALT_NAME, WRAPPED_NAME = "secrets.salt", "secrets.wrapped"
"""With a passphrase: what the key is made from, or, where it was another one before, the key sealed with it."""
HOLDERS: dict[Seal, tuple[str, ...]] = {
    "passphrase": (WRAPPED_NAME, SALT_NAME),
    "keyring": (ACCOUNT_NAME,),
    "file": (KEY_NAME,),
}
"""The files of each way, the way that counts first where two are there."""


def sealed_by(state: Path) -> Seal:
    """Return what seals the store in a folder of state, or would seal a new one."""
    for way, names in HOLDERS.items():
        if any((state / name).exists() for name in names):
            return way
    return "passphrase" if os.environ.get(FILE) or os.environ.get(DESCRIPTOR) else "file"
