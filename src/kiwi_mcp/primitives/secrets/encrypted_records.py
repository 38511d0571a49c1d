"""Encrypted records, one AES-GCM file each, such as the private signing keys of the owner."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from time import monotonic

from msgspec import Struct

from kiwi_mcp.domain.errors import NotFound, StoreDamaged, StoreUnavailable, TooLarge
from kiwi_mcp.domain.json import Json, JsonObject, as_object, compact
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.secrets.key_storage import decrypt, encrypt, replace_private, unusable

PATIENCE = 40.0
"""How long to wait for another process that changes a record, in seconds: longer than a request may take."""
_MARK = b"kiwi sealed 1\n"
_NONCE = 12
_LARGEST = 1_000_000
_LOG_IN_AGAIN = "Log in again (`kiwi mcp login SERVER`), which replaces it."
_PRIVATE = "private"


class EncryptedRecord(Struct, frozen=True):
    """The content of one encrypted record: facts, and secrets by name."""

    facts: JsonObject
    secrets: Mapping[str, Secret]


class EncryptedRecords:
    """Records by name, in a folder; `key` gives the key, `remedy` is what to do about a record that does not open."""

    def __init__(self, folder: Path, key: Callable[[], bytes], *, remedy: str = _LOG_IN_AGAIN) -> None:
        self._folder = folder
        self._key = key
        self._remedy = remedy

    def mark(self, name: str) -> tuple[int, int] | None:
        """Return a value that changes whenever a record does; None if there is no record."""
        try:
            state = self._path(name).stat()
        except OSError:
            return None
        return state.st_mtime_ns, state.st_ino

    def read(self, name: str) -> EncryptedRecord | None:
        """Return a record, or None where there is none; one that does not open is an error."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                data = file.read(_LARGEST + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unusable(path, error) from error
        if len(data) > _LARGEST or not data.startswith(_MARK):
            raise self._damaged(path)
        nonce, sealed = data[len(_MARK) :][:_NONCE], data[len(_MARK) + _NONCE :]
        try:
            opened: Json = json.loads(decrypt(self._key(), nonce, sealed, name.encode()))
        except ValueError:
            raise self._damaged(path) from None
        found = as_object(as_object(opened).get("secrets"))
        secrets = {word: Secret(value) for word, value in found.items() if isinstance(value, str)}
        return EncryptedRecord(as_object(as_object(opened).get("facts")), secrets)

    def write(self, name: str, record: EncryptedRecord) -> None:
        """Put a record in the place of the one of that name, whole."""
        secrets = {word: secret.reveal() for word, secret in record.secrets.items()}
        content, nonce = compact({"facts": record.facts, "secrets": secrets}).encode(), token_bytes(_NONCE)
        data = _MARK + nonce + encrypt(self._key(), nonce, content, name.encode())
        if len(data) > _LARGEST:
            raise TooLarge("What is to be sealed", size=len(data), limit=_LARGEST)
        replace_private(self._path(name), data)

    def remove(self, name: str) -> bool:
        """Remove a record, also one that does not open, and say whether there was one."""
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unusable(path, error) from error
        return True

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        """Lock a record against changes by other processes; reads within the block return the newest content."""
        path = self._path(name).with_suffix(".lock")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise unusable(path, error) from error
        try:
            await _locked(lock, path)
            yield
        finally:
            os.close(lock)

    def _damaged(self, path: Path) -> StoreDamaged:
        return StoreDamaged(
            f"{path} is damaged, or was sealed with another key, and cannot be opened.",
            suggestion=self._remedy,
            path=str(path),
        )

    def _path(self, name: str) -> Path:
        # Names contain addresses and paths, which are private.
        return self._folder / f"{sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}.sealed"


async def _locked(lock: int, path: Path) -> None:
    end = monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > end:
                raise StoreUnavailable(f"Another process holds {path}.", suggestion="Try again.") from None
            await asyncio.sleep(0.05)
        except OSError as error:
            raise unusable(path, error) from error


class KeyPairs:
    """The owner's Ed25519 keys, in a folder; `key` gives what seals them."""

    def __init__(self, folder: Path, key: Callable[[], bytes]) -> None:
        remedy = f"Put {folder} back from a backup, or make another key: `kiwi key new`, then revoke this one."
        self._sealed = EncryptedRecords(folder, key, remedy=remedy)
        self._remedy = remedy

    def make(self) -> str:
        """Make a pair, keep its private key, and return the public one."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        private = Ed25519PrivateKey.generate()
        while (public := _text(private.public_key().public_bytes_raw())).startswith(
            "-"
        ):  # a command would take such a key for an option
            private = Ed25519PrivateKey.generate()
        self._sealed.write(public, EncryptedRecord({}, {_PRIVATE: Secret(_text(private.private_bytes_raw()))}))
        return public

    def sign(self, public: str, data: bytes) -> str:
        """Return the signature of some bytes by one of the keys."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        record = self._sealed.read(public)
        if record is None:
            raise NotFound("The private key is not on this machine.", suggestion=self._remedy, key=public)
        try:
            private = Ed25519PrivateKey.from_private_bytes(urlsafe_b64decode(f"{record.secrets[_PRIVATE].reveal()}="))
        except (KeyError, ValueError):
            raise StoreDamaged("The private key is damaged.", suggestion=self._remedy, key=public) from None
        if _text(private.public_key().public_bytes_raw()) != public:
            raise StoreDamaged("The private key is another one than its name says.", suggestion=self._remedy)
        return _text(private.sign(data))


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
