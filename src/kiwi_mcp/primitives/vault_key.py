"""The key of the store of secrets: in a file of its own, in the keyring of the system, or behind a passphrase.

Which of them it is was decided when the store was made, or moved since: the key itself stays the same then, so that a
move that is broken off leaves two ways to one key and never none. A passphrase or keyring that is missing is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from secrets import token_bytes, token_hex
from select import select
from time import monotonic

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable
from kiwi_mcp.primitives import keyring
from kiwi_mcp.primitives.key_file import KEY_BYTES, file_key, unusable, write_private
from kiwi_mcp.primitives.sealing import (
    ACCOUNT_NAME,
    DESCRIPTOR,
    FILE,
    HOLDERS,
    KEY_NAME,
    SALT_NAME,
    WRAPPED_NAME,
    Seal,
    sealed_by,
)

_COST, _BLOCK, _LANES = 2**17, 8, 1
_LONGEST = 4_096
_PATIENCE = 10.0
_NONCE = 12
_descriptors: dict[str, bytes] = {}
"""What was read from descriptors, which give it once."""


def vault_key(state: Path) -> Callable[[], bytes]:
    """Return the way to the key of the store in a folder of state; it is made when it is first needed."""

    def key() -> bytes:
        match sealed_by(state):
            case "file":
                return file_key(state / KEY_NAME)()
            case "keyring":
                return _from_keyring(_account(state))
        # The passphrase is asked for first, so that none of a wrong start leaves a salt behind.
        given = _passphrase()
        if (state / WRAPPED_NAME).exists():
            return _unwrapped(state / WRAPPED_NAME, given)
        return _derived(given, file_key(state / SALT_NAME)())

    return key


def move_key(state: Path, seal: Seal) -> None:
    """Have the key of a store kept in another way; the store stays as it is, and is opened by that key alone."""
    before, key = sealed_by(state), vault_key(state)()
    known = _account(state) if before == "keyring" != seal else ""
    try:
        if seal != before:
            _add_way(state, seal, key)
        # The new way is there, and the others go, also those that a move left behind when it was broken off.
        for name in (name for way, names in HOLDERS.items() if way != seal for name in names):
            (state / name).unlink(missing_ok=True)
    except OSError as error:
        raise unusable(state, error) from error
    if known:
        keyring.forget(known)


def _add_way(state: Path, seal: Seal, key: bytes) -> None:
    match seal:
        case "file":
            _put(state / KEY_NAME, key)
        case "passphrase":
            _put(state / WRAPPED_NAME, _wrapped(key, _passphrase()))
        case "keyring":
            name = f"secrets {token_hex(8)}"
            keyring.keep(name, key)
            _put(state / ACCOUNT_NAME, name.encode())


def _account(state: Path) -> str:
    return (state / ACCOUNT_NAME).read_text(encoding="ascii").strip()


@lru_cache(maxsize=4)
def _from_keyring(account: str) -> bytes:
    """Return the key that a keyring keeps; it may have to be unlocked, so it is asked once."""
    return keyring.fetch(account)


def _put(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        write_private(draft, data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _wrapped(key: bytes, passphrase: bytes) -> bytes:
    salt, nonce = token_bytes(KEY_BYTES), token_bytes(_NONCE)
    return salt + nonce + AESGCM(_derived(passphrase, salt)).encrypt(nonce, key, WRAPPED_NAME.encode())


def _unwrapped(path: Path, passphrase: bytes) -> bytes:
    data = path.read_bytes()
    salt, nonce, sealed = data[:KEY_BYTES], data[KEY_BYTES : KEY_BYTES + _NONCE], data[KEY_BYTES + _NONCE :]
    with suppress(InvalidTag, ValueError):
        return AESGCM(_derived(passphrase, salt)).decrypt(nonce, sealed, WRAPPED_NAME.encode())
    raise StoreDamaged(
        "The passphrase is not the one that the secrets are sealed with.",
        suggestion=f"Give the right one in the file that {FILE} names; nothing else opens them.",
        path=str(path),
    )


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
