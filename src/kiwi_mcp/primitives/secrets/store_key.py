"""The key of the secret store: in a separate file, or in the keyring of the system.

Moving it from one to the other leaves the key itself as it is: a move that is interrupted leaves two ways to one key
and never none. A missing keyring is an error. A key behind a passphrase, from an earlier version, can only be moved.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from secrets import token_hex
from select import select
from time import monotonic

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable
from kiwi_mcp.primitives.secrets import key_storage
from kiwi_mcp.primitives.secrets.key_storage import (
    ACCOUNT_NAME,
    DESCRIPTOR,
    FILE,
    KEY_BYTES,
    KEY_NAME,
    SALT_NAME,
    WRAPPED_NAME,
    Seal,
    decrypt,
    derive_key,
    file_key,
    is_behind_passphrase,
    replace_private,
    sealed_by,
    unusable,
)

_LONGEST = 4_096
_PASSPHRASE_TIMEOUT = 10.0
_NONCE = 12


def vault_key(state: Path) -> Callable[[], bytes]:
    """Return the way to the key of the store in a folder of state; it is made when it is first needed."""

    def key() -> bytes:
        return file_key(state / KEY_NAME)() if sealed_by(state) == "file" else _from_keyring(_account(state))

    return key


def move_key(state: Path, seal: Seal, check: Callable[[bytes], None]) -> None:
    """Move the key of a store to another place; the store itself does not change.

    `check` raises for a key that does not decrypt the store. Any passphrase gives a key, so nothing is removed before
    the key is checked.
    """
    is_old = is_behind_passphrase(state)
    before = None if is_old else sealed_by(state)
    key = _from_passphrase(state) if is_old else vault_key(state)()
    try:
        check(key)
    except StoreDamaged as error:
        raise (_wrong_passphrase(state) if is_old else error) from None
    account = _account(state) if (state / ACCOUNT_NAME).exists() else ""
    try:
        if seal == "file" != before:
            replace_private(state / KEY_NAME, key)
        if seal == "keyring" != before:
            name = f"secrets {token_hex(8)}"
            key_storage.keep(name, key)
            replace_private(state / ACCOUNT_NAME, name.encode())
        # The new place has the key. The others are removed, also those that an interrupted move left.
        other = ACCOUNT_NAME if seal == "file" else KEY_NAME
        for leftover in (SALT_NAME, WRAPPED_NAME, other):
            (state / leftover).unlink(missing_ok=True)
    except OSError as error:
        raise unusable(state, error) from error
    if account and before != seal:
        key_storage.forget(account)


def _account(state: Path) -> str:
    return (state / ACCOUNT_NAME).read_text(encoding="ascii").strip()


@lru_cache(maxsize=4)
def _from_keyring(account: str) -> bytes:
    """Return the key that a keyring keeps; it may have to be unlocked, so it is asked once."""
    return key_storage.fetch(account)


def _from_passphrase(state: Path) -> bytes:
    given, wrapped = _passphrase(), state / WRAPPED_NAME
    try:
        if wrapped.exists():
            data = wrapped.read_bytes()
            salt, nonce, sealed = data[:KEY_BYTES], data[KEY_BYTES : KEY_BYTES + _NONCE], data[KEY_BYTES + _NONCE :]
            with suppress(ValueError):
                return decrypt(derive_key(given, salt, KEY_BYTES), nonce, sealed, WRAPPED_NAME.encode())
            raise _wrong_passphrase(state)
        return derive_key(given, (state / SALT_NAME).read_bytes(), KEY_BYTES)
    except OSError as error:
        raise unusable(state, error) from error


def _wrong_passphrase(state: Path) -> StoreDamaged:
    return StoreDamaged(
        "The passphrase is not the one that the secrets are sealed with. Nothing was changed.",
        suggestion=f"Give the right one in the file that {FILE} names; nothing else opens them.",
        path=str(state),
    )


def _passphrase() -> bytes:
    path, number = os.environ.get(FILE, ""), os.environ.get(DESCRIPTOR, "")
    if not path and not number:
        raise StoreUnavailable(
            "The secrets are sealed with a passphrase, and none was given.",
            suggestion=f"Name a file that holds it in {FILE}, or the number of an open descriptor in {DESCRIPTOR}.",
        )
    try:
        given = _line(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if path else int(number))
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


def _line(descriptor: int) -> bytes:
    """Return the data of a descriptor, up to the end of its first line or a little over the limit, and close it."""
    given, end = b"", monotonic() + _PASSPHRASE_TIMEOUT
    try:
        while b"\n" not in given and len(given) <= _LONGEST:
            # Do not wait for a pipe that stays open without data.
            if not select([descriptor], [], [], max(0.0, end - monotonic()))[0]:
                raise TimeoutError("nothing came")
            if not (more := os.read(descriptor, _LONGEST)):
                break
            given += more
    finally:
        os.close(descriptor)
    return given
