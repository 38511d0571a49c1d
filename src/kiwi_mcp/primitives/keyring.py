"""The keyring of the system, where there is a real one: a place for the key that seals the store of secrets.

The library `keyring` is optional, and what it finds is believed only if it is one of the systems' own keyrings: its
stand-ins keep nothing, or keep it for everybody to read.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import Protocol, TypeVar

from kiwi_mcp.domain.errors import StoreUnavailable

SERVICE = "kiwi"
_REAL = frozenset({"SecretService", "libsecret", "kwallet", "macOS", "Windows"})
_BACKENDS = "keyring.backends."
_PATIENCE = 60.0
"""How long a keyring may take, in seconds: it may have to ask its owner for a password."""
_LOOK_PATIENCE = 5.0
_T = TypeVar("_T")


class Keyring(Protocol):
    """A keyring, as far as it is used here."""

    def get_password(self, service: str, username: str) -> str | None:
        """Return what is kept under a name."""

    def set_password(self, service: str, username: str, password: str) -> None:
        """Keep something under a name."""

    def delete_password(self, service: str, username: str) -> None:
        """Forget what is kept under a name."""


def has_keyring() -> bool:
    """Whether the system has a keyring of its own."""
    with suppress(StoreUnavailable):
        return _within(_LOOK_PATIENCE, _found) is not None
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
    """Keep a key under a name, and see that it is there."""
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
    ring = _within(_LOOK_PATIENCE, _found)
    if ring is None:
        raise StoreUnavailable(
            "The key of the secrets belongs in the keyring of the system, and there is none.",
            suggestion="Install Kiwi with its extra `keyring` in a session that has a keyring, or seal the secrets "
            "otherwise: `kiwi secrets seal file` or `kiwi secrets seal passphrase`.",
        )
    return _within(_PATIENCE, lambda: ask(ring))


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
    """Return what a question gives, asked beside the caller, so that a keyring that hangs holds nobody up."""
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
