"""Ed25519 verification. It is loaded with the first key, because few items have one."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_KEY, _PROOF = 32, 64


def is_signed(key: str, proof: str, data: bytes) -> bool:
    """Whether a key, as text, signed some bytes; each key and each proof has one spelling only."""
    public, signature = _bytes(key, _KEY), _bytes(proof, _PROOF)
    if public is None or signature is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _bytes(text: str, size: int) -> bytes | None:
    try:
        data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    is_only_spelling = urlsafe_b64encode(data).rstrip(b"=").decode() == text
    return data if len(data) == size and is_only_spelling else None
