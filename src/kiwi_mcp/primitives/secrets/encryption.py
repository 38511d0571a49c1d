"""Encryption and signatures.

`cryptography` is imported by the functions that use it: few calls need a key, and loading it takes longer than a call.
"""

from __future__ import annotations

_COST = 2**17
"""The work that a passphrase takes, which makes guessing it slow."""


def encrypt(key: bytes, nonce: bytes, data: bytes, name: bytes) -> bytes:
    """Return some bytes encrypted and authenticated, together with a name, by AES-GCM."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

    return AESGCM(key).encrypt(nonce, data, name)


def decrypt(key: bytes, nonce: bytes, sealed: bytes, name: bytes) -> bytes:
    """Return what `encrypt` was given; another key or name, or bytes that were changed, are a ValueError."""
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

    try:
        return AESGCM(key).decrypt(nonce, sealed, name)
    except InvalidTag:
        raise ValueError("the key does not open it") from None


def derive_key(passphrase: bytes, salt: bytes, size: int) -> bytes:
    """Return the key of a passphrase by scrypt; this takes about a second."""
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt  # noqa: PLC0415

    return Scrypt(salt=salt, length=size, n=_COST, r=8, p=1).derive(passphrase)


def new_private_key() -> bytes:
    """Return a new Ed25519 private key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """Return the public key of a private key; bytes that are no key are a ValueError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, data: bytes) -> bytes:
    """Return the Ed25519 signature of some bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    return Ed25519PrivateKey.from_private_bytes(private).sign(data)
