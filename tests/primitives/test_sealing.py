"""The key of the store of secrets moves between a file, a passphrase and a keyring; there is always a way to it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest
from keyring import get_keyring, set_keyring
from keyring.backend import KeyringBackend
from keyring.backends import fail, null
from keyring.compat import properties

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable
from kiwi_mcp.primitives import keyring
from kiwi_mcp.primitives.sealing import HOLDERS, Seal, sealed_by
from kiwi_mcp.primitives.secrets import Bound, Secret
from kiwi_mcp.primitives.vault import Vault
from kiwi_mcp.primitives.vault_key import _from_keyring, move_key, vault_key

VALUE = "s3cret-value-of-mail"


class Ring(KeyringBackend):
    """A keyring in memory, which passes for the one of a desktop."""

    __module__ = "keyring.backends.SecretService"

    @properties.classproperty
    def priority(self) -> float:
        """No: it is there where a test chooses it, and nobody finds it otherwise."""
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
def passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A passphrase that is given only where a store is sealed with one: another store would begin with it."""
    path = tmp_path / "passphrase"
    path.write_text("correct horse battery\n")
    monkeypatch.setattr("kiwi_mcp.primitives.vault_key._COST", 2**12)
    return path


@pytest.fixture
def ring() -> Iterator[Ring]:
    """A real keyring, as far as Kiwi can see."""
    before, made = get_keyring(), Ring()
    set_keyring(made)
    _from_keyring.cache_clear()
    yield made
    set_keyring(before)


def vault(state: Path) -> Vault:
    return Vault(state / "secrets", vault_key(state))


def begin(state: Path) -> None:
    asyncio.run(vault(state).put("MAIL_KEY", Secret(VALUE), Bound()))


def value(state: Path) -> str:
    kept = vault(state)
    return kept.value(kept.named("MAIL_KEY")).reveal()


def holders(state: Path) -> set[str]:
    return {path.name for path in state.iterdir() if path.is_file()}


@pytest.mark.parametrize("ways", [*permutations(HOLDERS)], ids="-".join)
def test_the_key_moves_from_each_way_to_each_and_the_store_stays_as_it_is(
    ways: tuple[Seal, ...], tmp_path: Path, passphrase: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    begin(state)
    before = {path: path.read_bytes() for path in (state / "secrets").glob("*.sealed")}
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(passphrase))
    for way in (*ways, *ways):
        move_key(state, way)
        assert sealed_by(state) == way
        assert value(state) == VALUE
        assert len(holders(state)) == 1
        assert len(ring.kept) == (way == "keyring")
    assert {path: path.read_bytes() for path in (state / "secrets").glob("*.sealed")} == before


@pytest.mark.case("SEC-11")
def test_behind_a_passphrase_nothing_else_opens(
    tmp_path: Path, passphrase: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, wrong = tmp_path / "state", tmp_path / "wrong"
    wrong.write_text("incorrect horse\n")
    begin(state)
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(passphrase))
    move_key(state, "passphrase")
    assert b"correct" not in (state / "secrets.wrapped").read_bytes()
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(wrong))
    with pytest.raises(StoreDamaged, match="passphrase"):
        value(state)
    monkeypatch.delenv("KIWI_PASSPHRASE_FILE")
    with pytest.raises(StoreUnavailable, match="none was given"):
        value(state)


def test_a_move_that_was_broken_off_is_finished_by_the_next(tmp_path: Path, ring: Ring) -> None:
    state = tmp_path / "state"
    begin(state)
    key = (state / "secrets.key").read_bytes()
    move_key(state, "keyring")
    (state / "secrets.key").write_bytes(key)  # as if it had not gone yet
    assert value(state) == VALUE
    move_key(state, "keyring")
    assert holders(state) == {"secrets.keyring"}
    assert value(state) == VALUE
    assert len(ring.kept) == 1


@pytest.mark.parametrize("stand_in", [fail.Keyring, null.Keyring])
def test_a_stand_in_for_a_keyring_is_not_one(stand_in: type[KeyringBackend], tmp_path: Path, ring: Ring) -> None:
    state = tmp_path / "state"
    begin(state)
    set_keyring(stand_in())
    assert not keyring.has_keyring()
    with pytest.raises(StoreUnavailable, match="there is none"):
        move_key(state, "keyring")
    assert (sealed_by(state), value(state)) == ("file", VALUE)


def test_without_the_library_there_is_no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert not keyring.has_keyring()


def test_a_keyring_that_lost_the_key_or_hangs_is_an_error_and_not_a_new_key(
    tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    begin(state)
    move_key(state, "keyring")
    _from_keyring.cache_clear()
    monkeypatch.setattr(keyring, "_PATIENCE", 0.1)
    ring.seconds = 2.0
    with pytest.raises(StoreUnavailable, match="did not answer"):
        value(state)
    ring.seconds = 0.0
    ring.kept.clear()
    with pytest.raises(StoreUnavailable, match="not in the keyring"):
        value(state)
    assert holders(state) == {"secrets.keyring"}
