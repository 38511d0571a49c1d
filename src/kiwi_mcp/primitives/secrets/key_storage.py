"""The key of the secret store, in a separate file or in the keyring of the system; HMAC with a key file.

Moving it from one to the other leaves the key itself as it is: a move that is interrupted leaves two ways to one key
and never none. A missing keyring is an error. A key behind a passphrase, from an earlier version, can only be moved.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import lru_cache
from hmac import compare_digest, digest
from importlib import import_module
from pathlib import Path
from select import select
from threading import Thread
from time import monotonic
from typing import Literal, Protocol, TypeAlias, TypeVar

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable, install_line

KEY_BYTES = 32
SERVICE = "kiwi"
_BACKENDS = "keyring.backends."
_REAL = frozenset({"SecretService", "libsecret", "kwallet", "macOS", "Windows"})
_KEYRING_TIMEOUT = 60.0
"""How long a keyring may take, in seconds: it may have to ask its owner for a password."""
_KEYRING_LOOKUP_TIMEOUT = 5.0
_T = TypeVar("_T")
Seal: TypeAlias = Literal["file", "keyring"]
SEALS: dict[Seal, str] = {"file": "key file", "keyring": "keyring"}
"""The places of the key, and the name of each for people."""
FILE, DESCRIPTOR = "KIWI_PASSPHRASE_FILE", "KIWI_PASSPHRASE_FD"
"""The variables that say where the passphrase of an older store is read from."""
KEY_NAME, ACCOUNT_NAME = "secrets.key", "secrets.keyring"
"""The key itself, and the name under which a keyring keeps it."""
SALT_NAME, WRAPPED_NAME = "secrets.salt", "secrets.wrapped"
"""Files of a store that an earlier version sealed with a passphrase: what its key is made from, or the sealed key."""
_COST = 2**17
"""The work that a passphrase takes, which makes guessing it slow."""
_LONGEST_PASSPHRASE = 4_096
_PASSPHRASE_TIMEOUT = 10.0
_NONCE = 12


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
    """Write a new file that only its owner can read, and flush it to the disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_private(path: Path, data: bytes) -> None:
    """Replace a file that only its owner can read. Readers see the old or the new content, also after a power loss."""
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


@lru_cache(maxsize=4)
def fetch(account: str) -> bytes:
    """Return the key that a keyring keeps under a name; it may have to be unlocked, so it is asked once."""
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


def vault_key(state: Path) -> Callable[[], bytes]:
    """Return the way to the key of the store in a folder of state; it is made when it is first needed."""

    def key() -> bytes:
        return file_key(state / KEY_NAME)() if sealed_by(state) == "file" else fetch(_account(state))

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
            name = f"secrets {secrets.token_hex(8)}"
            keep(name, key)
            replace_private(state / ACCOUNT_NAME, name.encode())
        # The new place has the key. The others are removed, also those that an interrupted move left.
        other = ACCOUNT_NAME if seal == "file" else KEY_NAME
        for leftover in (SALT_NAME, WRAPPED_NAME, other):
            (state / leftover).unlink(missing_ok=True)
    except OSError as error:
        raise unusable(state, error) from error
    if account and before != seal:
        forget(account)


def _account(state: Path) -> str:
    return (state / ACCOUNT_NAME).read_text(encoding="ascii").strip()


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
    if not (passphrase := given.partition(b"\n")[0].removesuffix(b"\r")) or len(given) > _LONGEST_PASSPHRASE:
        raise StoreUnavailable(
            f"The passphrase is empty, or longer than {_LONGEST_PASSPHRASE:,} bytes.",
            suggestion="Give one line of text.",
        )
    return passphrase


def _line(descriptor: int) -> bytes:
    """Return the data of a descriptor, up to the end of its first line or a little over the limit, and close it."""
    given, end = b"", monotonic() + _PASSPHRASE_TIMEOUT
    try:
        while b"\n" not in given and len(given) <= _LONGEST_PASSPHRASE:
            # Do not wait for a pipe that stays open without data.
            if not select([descriptor], [], [], max(0.0, end - monotonic()))[0]:
                raise TimeoutError("nothing came")
            if not (more := os.read(descriptor, _LONGEST_PASSPHRASE)):
                break
            given += more
    finally:
        os.close(descriptor)
    return given
