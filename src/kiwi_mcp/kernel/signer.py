"""The owner's key, with which items and releases are signed."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from kiwi_mcp.domain.items import Tool
from kiwi_mcp.manifest.signatures import DETACHED, has_sidecar, line, sidecar, sign, signature_form, statement_for
from kiwi_mcp.manifest.trust import FILE_NAME, LOCAL, TrustedKey, owner_trust
from kiwi_mcp.policy.secret_access import vault_folder
from kiwi_mcp.primitives.secrets.encrypted_records import KeyPairs
from kiwi_mcp.primitives.secrets.key_storage import vault_key

KEYS_FOLDER = "keys"
"""Where the private keys are, beside the secrets."""
_TOLD = 12
"""How many keys back a publication tells how its key came to be."""


def pairs_of(user: Path) -> KeyPairs:
    """Return the private keys of a user."""
    state = vault_folder(user).parent
    return KeyPairs(state / KEYS_FOLDER, vault_key(state))


class Signer(Struct, frozen=True):
    """Signs with one key of the owner's."""

    key: TrustedKey
    pairs: KeyPairs
    history: tuple[str, ...] = ()
    """The statements by which keys before it handed over, the oldest first."""

    @classmethod
    def of(cls, user: Path) -> Signer | None:
        """Return the signer of a user: the newest of their keys that is still valid; None if there is none."""
        own = owner_trust(user / FILE_NAME).own
        usable = [key for key in own.values() if not key.is_void]
        if not usable:
            return None
        history = tuple(key.rotation for key in own.values() if key.rotation)[-_TOLD:]
        return cls(max(reversed(usable), key=lambda key: key.since), pairs_of(user), history)


def signed_files(
    tool: Tool, data: bytes, *, namespace: str, timestamp: str, signer: Signer | None
) -> Mapping[str, bytes]:
    """Return the file with an item's manifest as it is signed for a namespace, and the file beside it, if it takes one.

    Without a signer the line says only that nothing changed.
    """
    name, suffix, digest = tool.origin.path.name, signature_form(tool.origin.path), tool.digest
    key = proof = ""
    if signer:
        key = signer.key.public
        signed = statement_for(tool.manifest, namespace=namespace, digest=digest, timestamp=timestamp, key=key)
        proof = signer.pairs.sign(key, signed)
    is_beside = suffix.lower() in DETACHED or (key and has_sidecar(suffix))
    beside = [line(timestamp, digest, key, proof)] if is_beside else []
    beside += signer.history if signer and namespace != LOCAL else ()
    if suffix.lower() not in DETACHED:
        data = sign(data.decode(), suffix, timestamp=timestamp, digest=digest, key=key, proof=proof).encode()
    return {name: data, **({sidecar(name): "".join(f"{one}\n" for one in beside).encode()} if beside else {})}


def sign_item(tool: Tool, timestamp: str, signer: Signer | None = None) -> None:
    """Write the signature line into the file that holds the item's manifest, the rest of it untouched."""
    path = tool.origin.path
    data = path.read_bytes()
    made = signed_files(tool, data, namespace=LOCAL, timestamp=timestamp, signer=signer)
    beside = path.with_name(sidecar(path.name))
    if beside.name not in made:
        beside.unlink(missing_ok=True)
    # The file beside it comes first: until the line is there as well, it says nothing.
    for name in sorted(made, key=lambda name: name == path.name):
        if name != path.name or made[name] != data:
            temporary = path.with_name(f".{name}.{secrets.token_hex(4)}.tmp")
            try:
                temporary.write_bytes(made[name])
                shutil.copymode(path, temporary)
                temporary.replace(path.with_name(name))
            finally:
                temporary.unlink(missing_ok=True)
