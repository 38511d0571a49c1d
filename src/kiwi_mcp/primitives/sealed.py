"""Secrets at rest: small records, each sealed in a file of its own with a key that stands apart from them.

The seal is AES-256-GCM under the record's name, so a file that was changed, or put in the place of another, does not
open. A file that does not open costs its own record and no other.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes, token_hex
from time import monotonic

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable, TooLarge
from kiwi_mcp.domain.json import Json, JsonObject, as_object, compact
from kiwi_mcp.primitives.key_file import unusable, write_private
from kiwi_mcp.primitives.secrets import Secret

PATIENCE = 40.0
"""How long to wait for another process that changes a record, in seconds: longer than a request may take."""
_MARK = b"kiwi sealed 1\n"
_NONCE = 12
_POLL = 0.05
_LARGEST = 1_000_000
_LOG_IN_AGAIN = "Log in again (`kiwi mcp login SERVER`), which replaces it."


@dataclass(frozen=True, slots=True)
class Record:
    """What is sealed together: facts, and secrets by name."""

    facts: JsonObject
    secrets: Mapping[str, Secret]


class Sealed:
    """Records by name, in a folder; `key` gives the key when one is first needed.

    `remedy` is what the owner does about a record that does not open.
    """

    def __init__(self, folder: Path, key: Callable[[], bytes], *, remedy: str = _LOG_IN_AGAIN) -> None:
        self._folder = folder
        self._key = key
        self._remedy = remedy

    def mark(self, name: str) -> tuple[int, int] | None:
        """Return what changes whenever a record does; None where there is no record."""
        try:
            state = self._path(name).stat()
        except OSError:
            return None
        return state.st_mtime_ns, state.st_ino

    def read(self, name: str) -> Record | None:
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
            opened: Json = json.loads(AESGCM(self._key()).decrypt(nonce, sealed, name.encode()))
        except (InvalidTag, ValueError):
            raise self._damaged(path) from None
        found = as_object(as_object(opened).get("secrets"))
        secrets = {word: Secret(value) for word, value in found.items() if isinstance(value, str)}
        return Record(as_object(as_object(opened).get("facts")), secrets)

    def write(self, name: str, record: Record) -> None:
        """Put a record in the place of the one of that name, whole."""
        secrets = {word: secret.reveal() for word, secret in record.secrets.items()}
        content, nonce = compact({"facts": record.facts, "secrets": secrets}).encode(), token_bytes(_NONCE)
        data = _MARK + nonce + AESGCM(self._key()).encrypt(nonce, content, name.encode())
        if len(data) > _LARGEST:
            raise TooLarge("What is to be sealed", size=len(data), limit=_LARGEST)
        _replace(self._path(name), data)

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
        """Be the only one, of all processes, who changes a record; what is read within is the newest."""
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
        # Names hold addresses and paths, which are nobody else's business.
        return self._folder / f"{sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}.sealed"


def _replace(path: Path, data: bytes) -> None:
    """Write a file for its owner's eyes: whoever reads sees the old content or the new one, also after a power cut."""
    draft = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write_private(draft, data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise unusable(path, error) from error


async def _locked(lock: int, path: Path) -> None:
    end = monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > end:
                raise StoreUnavailable(f"Another process holds {path}.", suggestion="Try again.") from None
            await asyncio.sleep(_POLL)
        except OSError as error:
            raise unusable(path, error) from error
