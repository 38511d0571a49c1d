"""The store of secrets at rest: what was put in comes out with the same key, and in no other way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import NotFound, StoreDamaged, StoreUnavailable, TooLarge
from kiwi_mcp.primitives.bounds import GrantedTo, Stored
from kiwi_mcp.primitives.sealing import sealed_by
from kiwi_mcp.primitives.secrets import Bound, Secret
from kiwi_mcp.primitives.vault import MOST_GRANTS, Vault
from kiwi_mcp.primitives.vault_key import vault_key

VALUE, OTHER = "s3cret-value-of-mail", "an0ther-value-of-bank"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had just started: a number of a descriptor is another one's by now."""
    monkeypatch.setattr("kiwi_mcp.primitives.vault_key._descriptors", {})


def vault(state: Path) -> Vault:
    return Vault(state / "secrets", vault_key(state))


def put(state: Path, name: str, value: str, bound: Bound = Bound()) -> Stored:  # noqa: B008 - it is frozen
    return asyncio.run(vault(state).put(name, Secret(value), bound))


def value(state: Path, name: str) -> str:
    kept = vault(state)
    return kept.value(kept.named(name)).reveal()


def records(state: Path) -> set[Path]:
    return {*(state / "secrets").glob("*.sealed")}


@pytest.mark.case("SEC-11")
def test_nothing_of_a_secret_can_be_read_from_the_files_and_nobody_else_may_open_them(tmp_path: Path) -> None:
    put(tmp_path, "MAIL_KEY", VALUE, Bound(("mail.example",), "header"))

    assert value(tmp_path, "MAIL_KEY") == VALUE
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and ".cache" not in path.parts):
        assert not any(word in path.read_bytes() for word in (VALUE.encode(), b"MAIL_KEY", b"mail.example"))
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


def test_a_secret_keeps_its_hosts_its_form_and_its_grants(tmp_path: Path) -> None:
    first = put(tmp_path, "MAIL_KEY", VALUE, Bound(("mail.example",), "any"))
    asyncio.run(vault(tmp_path).grant("MAIL_KEY", GrantedTo("user/local/post", "")))
    second = put(tmp_path, "MAIL_KEY", OTHER, first.bound)

    assert value(tmp_path, "MAIL_KEY") == OTHER
    assert vault(tmp_path).all() == {"MAIL_KEY": second}
    assert (second.bound, second.grants) == (first.bound, (GrantedTo("user/local/post", ""),))
    assert (second.set_at, second.version) == (first.set_at, 2)
    assert len(records(tmp_path)) == 2  # the list, and the value that counts


@pytest.mark.case("SEC-11")
@settings(max_examples=40, deadline=None)
@given(place=st.integers(min_value=0, max_value=10_000), change=st.integers(min_value=1, max_value=255))
def test_a_flipped_byte_opens_nothing(place: int, change: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        put(state, "MAIL_KEY", VALUE)
        before = [*records(state)]
        path = before[place % len(before)]
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= change
        path.write_bytes(data)

        with pytest.raises(StoreDamaged):
            value(state, "MAIL_KEY")


@pytest.mark.case("SEC-11")
def test_two_values_cannot_be_swapped(tmp_path: Path) -> None:
    put(tmp_path, "MAIL_KEY", VALUE)
    known = records(tmp_path)
    put(tmp_path, "BANK_KEY", OTHER)
    [bank] = records(tmp_path) - known
    mail = next(path for path in known if path.stat().st_size < bank.stat().st_size + 20)
    one, two = mail.read_bytes(), bank.read_bytes()
    mail.write_bytes(two)
    bank.write_bytes(one)

    for name in ("MAIL_KEY", "BANK_KEY"):
        with pytest.raises(StoreDamaged):
            value(tmp_path, name)


@pytest.mark.case("SEC-11")
def test_an_older_value_cannot_be_put_back_not_even_of_a_name_that_was_removed(tmp_path: Path) -> None:
    put(tmp_path, "OTHER_KEY", OTHER)
    known = records(tmp_path)
    put(tmp_path, "MAIL_KEY", VALUE)
    [old] = records(tmp_path) - known
    data = old.read_bytes()
    asyncio.run(vault(tmp_path).remove("MAIL_KEY"))
    known = records(tmp_path)
    put(tmp_path, "MAIL_KEY", "the-value-of-now")
    [new] = records(tmp_path) - known
    new.write_bytes(data)
    old.write_bytes(data)

    with pytest.raises(StoreDamaged):
        value(tmp_path, "MAIL_KEY")


@pytest.mark.case("SEC-11")
def test_another_key_opens_nothing_and_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path, "MAIL_KEY", VALUE)
    (tmp_path / "secrets.key").write_bytes(bytes(32))
    before = {path: path.read_bytes() for path in records(tmp_path)}

    with pytest.raises(StoreDamaged, match="another key"):
        vault(tmp_path).all()
    with pytest.raises(StoreDamaged, match="another key"):
        put(tmp_path, "MAIL_KEY", OTHER)
    assert {path: path.read_bytes() for path in records(tmp_path)} == before


@pytest.mark.case("SEC-11")
def test_a_passphrase_seals_and_nothing_else_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, wrong = tmp_path / "given", tmp_path / "wrong"
    given.write_text("correct horse battery\n")
    wrong.write_text("incorrect horse\n")
    state = tmp_path / "state"
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(given))
    put(state, "MAIL_KEY", VALUE)
    assert (value(state, "MAIL_KEY"), sealed_by(state)) == (VALUE, "passphrase")
    assert not (state / "secrets.key").exists()

    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(wrong))
    with pytest.raises(StoreDamaged, match="another key"):
        vault(state).all()
    monkeypatch.delenv("KIWI_PASSPHRASE_FILE")
    with pytest.raises(StoreUnavailable, match="none was given"):
        vault(state).all()

    # A key that somebody lays beside it is not taken instead.
    (state / "secrets.key").write_bytes(bytes(32))
    with pytest.raises(StoreUnavailable, match="none was given"):
        vault(state).all()

    reading, writing = os.pipe()
    os.write(writing, b"correct horse battery\n")
    os.close(writing)
    monkeypatch.setenv("KIWI_PASSPHRASE_FD", str(reading))
    assert value(state, "MAIL_KEY") == VALUE
    assert value(state, "MAIL_KEY") == VALUE


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 5_000, None])
def test_a_passphrase_that_cannot_be_one_makes_no_store(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "given"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(file))

    with pytest.raises(StoreUnavailable):
        put(tmp_path / "state", "MAIL_KEY", VALUE)
    assert not records(tmp_path / "state")
    assert not (tmp_path / "state" / "secrets.salt").exists()


def test_a_passphrase_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiwi_mcp.primitives.vault_key._PATIENCE", 0.1)
    reading, writing = os.pipe()
    monkeypatch.setenv("KIWI_PASSPHRASE_FD", str(reading))

    with pytest.raises(StoreUnavailable, match="nothing came"):
        put(tmp_path, "MAIL_KEY", VALUE)
    os.close(writing)


def test_what_opens_the_store_is_loaded_by_nobody_who_has_none() -> None:
    program = "import sys, kiwi_mcp.kernel; print('cryptography' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert said.stdout == "False\n"


def test_a_list_whose_value_is_gone_says_so(tmp_path: Path) -> None:
    put(tmp_path, "MAIL_KEY", VALUE)
    put(tmp_path, "BANK_KEY", OTHER)
    sizes = sorted(records(tmp_path), key=lambda path: path.stat().st_size)
    for path in sizes[:-1]:
        path.unlink()

    with pytest.raises(StoreDamaged, match="MAIL_KEY is not in the store"):
        value(tmp_path, "MAIL_KEY")


def test_of_many_who_change_the_store_at_once_none_undoes_the_others(tmp_path: Path) -> None:
    def change(number: int) -> Coroutine[object, object, Stored]:
        return vault(tmp_path).put(f"KEY_{number}", Secret(f"{VALUE}{number}"), Bound())

    async def all_at_once() -> None:
        await asyncio.gather(*map(change, range(8)))

    asyncio.run(all_at_once())
    assert sorted(vault(tmp_path).all()) == [f"KEY_{number}" for number in range(8)]
    assert sorted(one.version for one in vault(tmp_path).all().values()) == [*range(1, 9)]


def test_what_is_not_there_is_not_found_and_what_is_too_much_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="NOWHERE"):
        asyncio.run(vault(tmp_path).remove("NOWHERE"))
    put(tmp_path, "MAIL_KEY", VALUE)
    kept = vault(tmp_path)

    async def grants() -> None:
        for number in range(MOST_GRANTS + 1):
            await kept.grant("MAIL_KEY", GrantedTo(f"user/local/tool_{number}", ""))

    with pytest.raises(TooLarge):
        asyncio.run(grants())
    assert len(kept.named("MAIL_KEY").grants) == MOST_GRANTS
    asyncio.run(kept.revoke("MAIL_KEY", lambda _: True))
    assert vault(tmp_path).named("MAIL_KEY").grants == ()
