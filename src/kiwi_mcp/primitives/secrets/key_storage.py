"""Where the key of the secret store is kept: a key file or the keyring; HMAC with a key file."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from hmac import compare_digest, digest
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Literal, Protocol, TypeAlias, TypeVar

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable
from kiwi_mcp.domain.extras import install_line

KEY_BYTES = 32


def file_key(path: Path) -> Callable[[], bytes]:
    """Return the way to a key in a file that only its owner reads; it is made when it is first needed."""

    def key() -> bytes:
        try:
            found = path.read_bytes() if path.exists() else _new_key(path)
        except OSError as error:
            raise unusable(path, error) from error
        if len(found) != KEY_BYTES:
            raise StoreDamaged(
                f"{path} is no key any more, and nothing that was sealed with it can be opened.",
                suggestion="Put the key back, or remove the file and make anew what was sealed with it.",
                path=str(path),
            )
        return found

    return key


def write_private(path: Path, data: bytes) -> None:
    """Write a new file for its owner's eyes, to the disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_private(path: Path, data: bytes) -> None:
    """Replace a file for its owner's eyes. Readers see the old or the new content, also after a power loss."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write_private(draft, data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise unusable(path, error) from error


def unusable(path: Path, error: OSError) -> StoreUnavailable:
    """Error: a file of the owner cannot be read or written."""
    return StoreUnavailable(
        f"{path} cannot be used: {error.strerror or error}.",
        suggestion=f"Give yourself access to {path.parent}, or name another space with USER_SPACE.",
    )


def _new_key(path: Path) -> bytes:
    """Make a key; of two processes that do so at once, both use the one that was there first."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        write_private(draft, secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path.read_bytes()


SERVICE = "kiwi"
_REAL = frozenset({"SecretService", "libsecret", "kwallet", "macOS", "Windows"})
_BACKENDS = "keyring.backends."
_KEYRING_TIMEOUT = 60.0
"""How long a keyring may take, in seconds: it may have to ask its owner for a password."""
_KEYRING_LOOKUP_TIMEOUT = 5.0
_T = TypeVar("_T")


class Keyring(Protocol):
    """A keyring, as far as it is used here."""

    def get_password(self, service: str, username: str) -> str | None:
        """Return the value stored under a name."""

    def set_password(self, service: str, username: str, password: str) -> None:
        """Keep something under a name."""

    def delete_password(self, service: str, username: str) -> None:
        """Delete the value stored under a name."""


def has_keyring() -> bool:
    """Whether the system has a keyring of its own."""
    with suppress(StoreUnavailable):
        return _within(_KEYRING_LOOKUP_TIMEOUT, _found) is not None
    return False


def fetch(account: str) -> bytes:
    """Return the key that is kept under a name; without it nothing can be opened."""
    kept = _asked(lambda ring: ring.get_password(SERVICE, account))
    if kept is None:
        raise StoreUnavailable(
            "The key of the secrets is not in the keyring of the system any more.",
            suggestion="Unlock or restore the keyring; without the key the secrets have to be set again.",
        )
    return base64.b64decode(kept)


def keep(account: str, key: bytes) -> None:
    """Store a key under a name, and check that it is there."""
    text = base64.b64encode(key).decode()

    def kept(ring: Keyring) -> bool:
        ring.set_password(SERVICE, account, text)
        return ring.get_password(SERVICE, account) == text

    if not _asked(kept):
        raise StoreUnavailable(
            "The keyring of the system did not keep the key.", suggestion="Unlock it, then try again."
        )


def forget(account: str) -> None:
    """Forget the key of a name; one that is not there is forgotten."""
    with suppress(StoreUnavailable):
        _asked(lambda ring: ring.delete_password(SERVICE, account))


def _asked(ask: Callable[[Keyring], _T]) -> _T:
    ring = _within(_KEYRING_LOOKUP_TIMEOUT, _found)
    if ring is None:
        raise StoreUnavailable(
            "The key of the secrets belongs in the keyring of the system, and there is none.",
            suggestion=f"Install the extra `keyring`: {install_line('keyring')}, in a session that has a keyring; or "
            "keep the key in a file: `kiwi secrets seal file`.",
        )
    return _within(_KEYRING_TIMEOUT, lambda: ask(ring))


def _found() -> Keyring | None:
    """Return the keyring of the system; None where the library is missing, or what it found is not one."""
    try:
        chosen = import_module("keyring").get_keyring()
    except ImportError:
        return None
    # A chain asks several one after the other, and may end at one that is not real: its first real one is used alone.
    for ring in getattr(chosen, "backends", ()) or (chosen,):
        kind: str = type(ring).__module__
        if kind.startswith(_BACKENDS) and kind.removeprefix(_BACKENDS) in _REAL:
            found: Keyring = ring
            return found
    return None


def _within(seconds: float, ask: Callable[[], _T]) -> _T:
    """Return the result of `ask`, called in another thread, so that a keyring that hangs does not block the caller."""
    answer: Future[_T] = Future()

    def work() -> None:
        with suppress(InvalidStateError):
            try:
                answer.set_result(ask())
            except Exception as error:  # noqa: BLE001 - backends raise what their systems do
                answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        reason = f"it did not answer for {seconds:.0f} seconds"
    except Exception as error:  # noqa: BLE001 - as above
        reason = f"{type(error).__name__}"
    raise StoreUnavailable(
        f"The keyring of the system cannot be used: {reason}.", suggestion="Unlock it, then try again."
    )


class Mac:
    """HMAC-SHA-256 under a key in a file that only its owner reads."""

    def __init__(self, path: Path) -> None:
        self._key = file_key(path)

    def of(self, data: bytes) -> str:
        """Return the mark of some bytes."""
        return digest(self._key(), data, "sha256").hex()

    def fits(self, data: bytes, mark: str) -> bool:
        """Whether a mark is that of some bytes."""
        return compare_digest(self.of(data).encode(), mark.encode(errors="replace"))


Seal: TypeAlias = Literal["file", "keyring"]
SEALS: dict[Seal, str] = {"file": "key file", "keyring": "keyring"}
"""The places of the key, and the name of each for people."""
FILE, DESCRIPTOR = "KIWI_PASSPHRASE_FILE", "KIWI_PASSPHRASE_FD"
"""The variables that say where the passphrase of an older store is read from."""
KEY_NAME, ACCOUNT_NAME = "secrets.key", "secrets.keyring"
"""The key itself, and the name under which a keyring keeps it."""
SALT_NAME, WRAPPED_NAME = "secrets.salt", "secrets.wrapped"
"""Files of a store that an earlier version sealed with a passphrase: what its key is made from, or the sealed key."""


def sealed_by(state: Path) -> Seal:
    """Return where the key of the store in a folder of state is kept, or would be kept for a new one."""
    if is_behind_passphrase(state):
        raise StoreUnavailable(
            "The secrets are sealed with a passphrase, which only `kiwi secrets seal` still opens.",
            suggestion="Convert them once with `kiwi secrets seal file` or `kiwi secrets seal keyring`: "
            f"name a file that holds the passphrase in {FILE}, or an open descriptor in {DESCRIPTOR}.",
        )
    if (state / ACCOUNT_NAME).exists():
        return "keyring"
    if not (state / KEY_NAME).exists() and (os.environ.get(FILE) or os.environ.get(DESCRIPTOR)):
        raise StoreUnavailable(
            f"{FILE} or {DESCRIPTOR} is set, and new secrets are no longer sealed with a passphrase.",
            suggestion="Unset both variables. The key is then kept in a file of yours; "
            "`kiwi secrets seal keyring` moves it to the keyring of the system.",
        )
    return "file"


def is_behind_passphrase(state: Path) -> bool:
    """Return whether an earlier version sealed the store with a passphrase."""
    return any((state / name).exists() for name in (WRAPPED_NAME, SALT_NAME))


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
