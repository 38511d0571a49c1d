"""The key of the store of secrets: in a file of its own, or made from a passphrase that the owner gives at the start.

Which of the two it is was decided when the store was made, and a passphrase that is missing is an error. A keyring of
the system would be a third way to the same 32 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from select import select
from time import monotonic
from typing import Literal

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from kiwi_mcp.domain.errors import StoreUnavailable
from kiwi_mcp.primitives.key_file import KEY_BYTES, file_key

FILE, DESCRIPTOR = "KIWI_PASSPHRASE_FILE", "KIWI_PASSPHRASE_FD"
_COST, _BLOCK, _LANES = 2**17, 8, 1
_LONGEST = 4_096
_PATIENCE = 10.0
_KEY_NAME, _SALT_NAME = "secrets.key", "secrets.salt"
_descriptors: dict[str, bytes] = {}
"""What was read from descriptors, which give it once."""


def sealed_by(state: Path) -> Literal["passphrase", "key file"]:
    """Return what seals the store in a folder of state, or would seal a new one."""
    if (state / _SALT_NAME).exists():
        return "passphrase"
    is_new = not (state / _KEY_NAME).exists()
    return "passphrase" if is_new and (os.environ.get(FILE) or os.environ.get(DESCRIPTOR)) else "key file"


def vault_key(state: Path) -> Callable[[], bytes]:
    """Return the way to the key of the store in a folder of state; it is made when it is first needed."""

    def key() -> bytes:
        if sealed_by(state) == "key file":
            return file_key(state / _KEY_NAME)()
        # The passphrase is asked for first, so that none of a wrong start leaves a salt behind.
        given = _passphrase()
        return _derived(given, file_key(state / _SALT_NAME)())

    return key


@lru_cache(maxsize=4)
def _derived(passphrase: bytes, salt: bytes) -> bytes:
    """Return the key of a passphrase; it takes about a second, so it is done once."""
    return Scrypt(salt=salt, length=KEY_BYTES, n=_COST, r=_BLOCK, p=_LANES).derive(passphrase)


def _passphrase() -> bytes:
    path, number = os.environ.get(FILE, ""), os.environ.get(DESCRIPTOR, "")
    if not path and not number:
        raise StoreUnavailable(
            "The secrets are sealed with a passphrase, and none was given.",
            suggestion=f"Name a file that holds it in {FILE}, or the number of an open descriptor in {DESCRIPTOR}.",
        )
    try:
        given = _line(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) if path else _handed_over(number)
    except (OSError, ValueError) as error:
        raise StoreUnavailable(
            f"The passphrase cannot be read from {path or f'descriptor {number}'}: {error}.",
            suggestion=f"Let {FILE} name a file that you can read.",
        ) from error
    if not (passphrase := given.partition(b"\n")[0].removesuffix(b"\r")) or len(given) > _LONGEST:
        raise StoreUnavailable(
            f"The passphrase is empty, or longer than {_LONGEST:,} bytes.", suggestion="Give one line of text."
        )
    return passphrase


def _handed_over(number: str) -> bytes:
    if number not in _descriptors:
        _descriptors[number] = _line(int(number))
    return _descriptors[number]


def _line(descriptor: int) -> bytes:
    """Return what a descriptor gives, up to the end of its first line or a little over the limit, and close it."""
    given, end = b"", monotonic() + _PATIENCE
    try:
        while b"\n" not in given and len(given) <= _LONGEST:
            # A pipe that somebody holds open and never writes to is not waited for.
            if not select([descriptor], [], [], max(0.0, end - monotonic()))[0]:
                raise TimeoutError("nothing came")
            if not (more := os.read(descriptor, _LONGEST)):
                break
            given += more
    finally:
        os.close(descriptor)
    return given
