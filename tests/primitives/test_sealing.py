"""The key of the secret store moves between a file and a keyring, and from an old passphrase."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from keyring import get_keyring, set_keyring
from keyring.backend import KeyringBackend
from keyring.backends import fail, null
from keyring.compat import properties

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.secrets import key_storage
from kiwi_mcp.primitives.secrets.key_storage import (
    SEALS,
    Seal,
    fetch,
    is_behind_passphrase,
    move_key,
    sealed_by,
    vault_key,
)
from kiwi_mcp.primitives.secrets.reveal import SecretScope
from kiwi_mcp.primitives.secrets.store import SecretStore

VALUE = "s3cret-value-of-mail"
PASSPHRASE = b"correct horse battery"
COST = 2**12
OLD = ["secrets.salt", "secrets.wrapped"]
"""The files by which an earlier version kept a key behind a passphrase."""


class Ring(KeyringBackend):
    """A keyring in memory, which passes for the one of a desktop."""

    __module__ = "keyring.backends.SecretService"

    @properties.classproperty
    def priority(self) -> float:
        """No: only a test selects it."""
        raise RuntimeError

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the library has no types there
        self.kept: dict[tuple[str, str], str] = {}
        self.seconds = 0.0

    def get_password(self, service: str, username: str) -> str | None:
        time.sleep(self.seconds)
        return self.kept.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.kept[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.kept[service, username]


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive keys from passphrases with less work than outside of tests."""
    monkeypatch.setattr("kiwi_mcp.primitives.secrets.key_storage._COST", COST)


@pytest.fixture
def ring(processes: None) -> Iterator[Ring]:
    """A real keyring, as far as Kiwi can see."""
    before, made = get_keyring(), Ring()
    set_keyring(made)
    fetch.cache_clear()
    yield made
    set_keyring(before)


def vault(state: Path) -> SecretStore:
    return SecretStore(state / "secrets", vault_key(state))


def begin(state: Path) -> None:
    asyncio.run(vault(state).put("MAIL_KEY", Secret(VALUE), SecretScope()))


def value(state: Path) -> str:
    kept = vault(state)
    return kept.value(kept.named("MAIL_KEY")).reveal()


def holders(state: Path) -> set[str]:
    return {path.name for path in state.iterdir() if path.is_file()}


def derived(salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=COST, r=8, p=1).derive(PASSPHRASE)


def begin_old(state: Path, name: str) -> None:
    """Make a store as earlier versions sealed it with a passphrase: by a salt, or with a wrapped key."""
    salt, nonce = os.urandom(32), os.urandom(12)
    key = derived(salt) if name == "secrets.salt" else os.urandom(32)
    asyncio.run(SecretStore(state / "secrets", lambda: key).put("MAIL_KEY", Secret(VALUE), SecretScope()))
    wrapped = salt + nonce + AESGCM(derived(salt)).encrypt(nonce, key, b"secrets.wrapped")
    (state / name).write_bytes(salt if name == "secrets.salt" else wrapped)


def give(passphrase: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(passphrase)
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(tmp_path / "given"))


def move(state: Path, seal: Seal) -> None:
    def check(key: bytes) -> None:
        SecretStore(state / "secrets", lambda: key).all()

    move_key(state, seal, check)


@pytest.mark.usefixtures("processes")
def test_the_key_moves_between_all_places_and_the_store_is_unchanged(tmp_path: Path, ring: Ring) -> None:
    state = tmp_path / "state"
    begin(state)
    before = {path: path.read_bytes() for path in (state / "secrets").glob("*.sealed")}
    for way in (*SEALS, *SEALS, *reversed(SEALS)):
        move(state, way)
        assert sealed_by(state) == way
        assert value(state) == VALUE
        assert len(holders(state)) == 1
        assert len(ring.kept) == (way == "keyring")
    assert {path: path.read_bytes() for path in (state / "secrets").glob("*.sealed")} == before


@pytest.mark.case("SEC-11")
@pytest.mark.parametrize("name", OLD)
def test_a_passphrase_store_is_refused_and_gets_no_new_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    begin_old(state, name)
    give(PASSPHRASE, monkeypatch, tmp_path)
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}

    for act in (lambda: value(state), lambda: begin(state), lambda: sealed_by(state)):
        with pytest.raises(StoreUnavailable, match="sealed with a passphrase") as refused:
            act()
        assert "`kiwi secrets seal file` or `kiwi secrets seal keyring`" in str(refused.value.suggestion)
    after = {path: path.read_bytes() for path in state.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert after == {path: data for path, data in before.items() if path.suffix != ".lock"}

    # A key that lies beside it is not used instead.
    (state / "secrets.key").write_bytes(bytes(32))
    with pytest.raises(StoreUnavailable, match="sealed with a passphrase"):
        value(state)


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("seal", SEALS)
def test_a_passphrase_store_is_converted_once(
    name: str, seal: Seal, tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    begin_old(state, name)
    give(PASSPHRASE + b"\n", monkeypatch, tmp_path)
    move(state, seal)
    assert (sealed_by(state), value(state), len(holders(state))) == (seal, VALUE, 1)
    monkeypatch.delenv("KIWI_PASSPHRASE_FILE")
    move(state, "file")
    assert (value(state), holders(state), ring.kept) == (VALUE, {"secrets.key"}, {})


def test_a_passphrase_can_be_read_from_a_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_old(tmp_path, "secrets.salt")
    reading, writing = os.pipe()
    os.write(writing, PASSPHRASE + b"\n")
    os.close(writing)
    monkeypatch.setenv("KIWI_PASSPHRASE_FD", str(reading))
    move(tmp_path, "file")
    assert value(tmp_path) == VALUE


@pytest.mark.case("SEC-11")
@pytest.mark.parametrize("name", OLD)
def test_only_the_right_passphrase_converts_a_store(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    begin_old(state, name)
    with pytest.raises(StoreUnavailable, match="none was given"):
        move(state, "file")
    give(b"incorrect horse\n", monkeypatch, tmp_path)
    with pytest.raises(StoreDamaged, match="passphrase"):
        move(state, "file")
    assert (holders(state), is_behind_passphrase(state)) == ({name}, True)


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 5_000, None])
def test_an_invalid_passphrase_converts_nothing(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_old(tmp_path / "state", "secrets.salt")
    give(content or b"", monkeypatch, tmp_path)
    if content is None:
        (tmp_path / "given").unlink()
    with pytest.raises(StoreUnavailable):
        move(tmp_path / "state", "file")
    assert holders(tmp_path / "state") == {"secrets.salt"}


def test_a_missing_passphrase_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_old(tmp_path, "secrets.salt")
    monkeypatch.setattr("kiwi_mcp.primitives.secrets.key_storage._PASSPHRASE_TIMEOUT", 0.1)
    reading, writing = os.pipe()
    monkeypatch.setenv("KIWI_PASSPHRASE_FD", str(reading))
    with pytest.raises(StoreUnavailable, match="nothing came"):
        move(tmp_path, "file")
    os.close(writing)


def test_a_new_store_with_a_passphrase_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(PASSPHRASE, monkeypatch, tmp_path)
    with pytest.raises(StoreUnavailable, match="no longer sealed with a passphrase"):
        begin(tmp_path / "state")
    assert holders(tmp_path / "state") == set()
    monkeypatch.delenv("KIWI_PASSPHRASE_FILE")
    begin(tmp_path / "state")
    give(PASSPHRASE, monkeypatch, tmp_path)
    assert value(tmp_path / "state") == VALUE


@pytest.mark.usefixtures("processes")
def test_an_interrupted_move_is_finished_by_the_next(tmp_path: Path, ring: Ring) -> None:
    state = tmp_path / "state"
    begin(state)
    key = (state / "secrets.key").read_bytes()
    move(state, "keyring")
    (state / "secrets.key").write_bytes(key)  # as if it had not gone yet
    assert value(state) == VALUE
    move(state, "keyring")
    assert holders(state) == {"secrets.keyring"}
    assert value(state) == VALUE
    assert len(ring.kept) == 1


@pytest.mark.parametrize("stand_in", [fail.Keyring, null.Keyring])
def test_a_fake_keyring_is_not_used(stand_in: type[KeyringBackend], tmp_path: Path, ring: Ring) -> None:
    state = tmp_path / "state"
    begin(state)
    set_keyring(stand_in())
    assert not key_storage.has_keyring()
    with pytest.raises(StoreUnavailable, match="there is none"):
        move(state, "keyring")
    assert (sealed_by(state), value(state)) == ("file", VALUE)


def test_without_the_library_there_is_no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert not key_storage.has_keyring()


def test_a_keyring_that_lost_the_key_or_blocks_is_an_error_and_not_a_new_key(
    tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    begin(state)
    move(state, "keyring")
    fetch.cache_clear()
    monkeypatch.setattr(key_storage, "_KEYRING_TIMEOUT", 0.1)
    ring.seconds = 2.0
    with pytest.raises(StoreUnavailable, match="did not answer"):
        value(state)
    ring.seconds = 0.0
    ring.kept.clear()
    with pytest.raises(StoreUnavailable, match="not in the keyring"):
        value(state)
    assert holders(state) == {"secrets.keyring"}
