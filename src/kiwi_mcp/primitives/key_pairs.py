"""Key pairs: the private keys that the owner signs with, each sealed in a file of its own, named by its public key."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiwi_mcp.domain.errors import NotFound, StoreDamaged
from kiwi_mcp.primitives.sealed import Record, Sealed
from kiwi_mcp.primitives.secrets import Secret

_PRIVATE = "private"


class KeyPairs:
    """The owner's Ed25519 keys, in a folder; `key` gives what seals them."""

    def __init__(self, folder: Path, key: Callable[[], bytes]) -> None:
        remedy = f"Put {folder} back from a backup, or make another key: `kiwi key new`, then revoke this one."
        self._sealed = Sealed(folder, key, remedy=remedy)
        self._remedy = remedy

    def make(self) -> str:
        """Make a pair, keep its private key, and return the public one."""
        private, public = _pair()
        while public.startswith("-"):  # a command would take such a key for an option
            private, public = _pair()
        self._sealed.write(public, Record({}, {_PRIVATE: Secret(_text(private.private_bytes_raw()))}))
        return public

    def sign(self, public: str, data: bytes) -> str:
        """Return the signature of some bytes by one of the keys."""
        record = self._sealed.read(public)
        if record is None:
            raise NotFound("The private key is not on this machine.", suggestion=self._remedy, key=public)
        try:
            private = Ed25519PrivateKey.from_private_bytes(_bytes(record.secrets[_PRIVATE]))
        except (KeyError, ValueError):
            raise StoreDamaged("The private key is damaged.", suggestion=self._remedy, key=public) from None
        if _text(private.public_key().public_bytes_raw()) != public:
            raise StoreDamaged("The private key is another one than its name says.", suggestion=self._remedy)
        return _text(private.sign(data))


def _pair() -> tuple[Ed25519PrivateKey, str]:
    private = Ed25519PrivateKey.generate()
    return private, _text(private.public_key().public_bytes_raw())


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(secret: Secret) -> bytes:
    return urlsafe_b64decode(f"{secret.reveal()}=")
