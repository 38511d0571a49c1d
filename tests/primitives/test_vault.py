"""The secret store at rest: readable only with its key."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import NotFound, StoreDamaged, TooLarge
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.secrets.encrypted_records import EncryptedRecord, EncryptedRecords
from kiwi_mcp.primitives.secrets.grants import SecretGrant, StoredSecret
from kiwi_mcp.primitives.secrets.key_storage import vault_key
from kiwi_mcp.primitives.secrets.reveal import SecretScope
from kiwi_mcp.primitives.secrets.store import MOST_GRANTS, SecretStore

VALUE, OTHER = "s3cret-value-of-mail", "an0ther-value-of-bank"


def vault(state: Path) -> SecretStore:
    return SecretStore(state / "secrets", vault_key(state))


def put(state: Path, name: str, value: str, bound: SecretScope = SecretScope()) -> StoredSecret:  # noqa: B008 - it is frozen
    return asyncio.run(vault(state).put(name, Secret(value), bound))


def value(state: Path, name: str) -> str:
    kept = vault(state)
    return kept.value(kept.named(name)).reveal()


def records(state: Path) -> set[Path]:
    return {*(state / "secrets").glob("*.sealed")}


@pytest.mark.case("SEC-11")
def test_the_files_reveal_no_secret_and_are_private(tmp_path: Path) -> None:
    put(tmp_path, "MAIL_KEY", VALUE, SecretScope(("mail.example",), "header"))

    assert value(tmp_path, "MAIL_KEY") == VALUE
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and ".cache" not in path.parts):
        assert not any(word in path.read_bytes() for word in (VALUE.encode(), b"MAIL_KEY", b"mail.example"))
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


def test_a_secret_stores_its_hosts_its_form_and_its_grants(tmp_path: Path) -> None:
    first = put(tmp_path, "MAIL_KEY", VALUE, SecretScope(("mail.example",), "any"))
    asyncio.run(vault(tmp_path).grant("MAIL_KEY", SecretGrant("user/local/post", "")))
    second = put(tmp_path, "MAIL_KEY", OTHER, first.bound)

    assert value(tmp_path, "MAIL_KEY") == OTHER
    assert vault(tmp_path).all() == {"MAIL_KEY": second}
    assert (second.bound, second.grants) == (first.bound, (SecretGrant("user/local/post", ""),))
    assert (second.set_at, second.version) == (first.set_at, 2)
    assert len(records(tmp_path)) == 2  # the list, and the value that counts


@pytest.mark.case("SEC-11")
@settings(max_examples=25, deadline=None)
@given(place=st.integers(min_value=0, max_value=10_000), change=st.integers(min_value=1, max_value=255))
def test_a_flipped_byte_is_refused(place: int, change: int) -> None:
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
def test_an_older_value_cannot_be_restored_even_after_removal(tmp_path: Path) -> None:
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
def test_another_key_opens_and_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path, "MAIL_KEY", VALUE)
    (tmp_path / "secrets.key").write_bytes(bytes(32))
    before = {path: path.read_bytes() for path in records(tmp_path)}

    with pytest.raises(StoreDamaged, match="another key"):
        vault(tmp_path).all()
    with pytest.raises(StoreDamaged, match="another key"):
        put(tmp_path, "MAIL_KEY", OTHER)
    assert {path: path.read_bytes() for path in records(tmp_path)} == before


@pytest.mark.usefixtures("processes")
def test_without_a_store_its_modules_are_not_loaded() -> None:
    program = "import sys, kiwi_mcp.kernel; print('cryptography' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout == "False\n"


def test_a_listed_secret_without_its_value_is_reported(tmp_path: Path) -> None:
    put(tmp_path, "MAIL_KEY", VALUE)
    put(tmp_path, "BANK_KEY", OTHER)
    sizes = sorted(records(tmp_path), key=lambda path: path.stat().st_size)
    for path in sizes[:-1]:
        path.unlink()

    with pytest.raises(StoreDamaged, match="MAIL_KEY is not in the store"):
        value(tmp_path, "MAIL_KEY")


async def test_concurrent_changes_of_the_store_do_not_undo_each_other(tmp_path: Path) -> None:
    def change(number: int) -> Coroutine[object, object, StoredSecret]:
        return vault(tmp_path).put(f"KEY_{number}", Secret(f"{VALUE}{number}"), SecretScope())

    await asyncio.gather(*map(change, range(8)))
    assert sorted(vault(tmp_path).all()) == [f"KEY_{number}" for number in range(8)]
    assert sorted(one.version for one in vault(tmp_path).all().values()) == [*range(1, 9)]


def test_an_unknown_secret_is_not_found_and_an_oversized_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="NOWHERE"):
        asyncio.run(vault(tmp_path).remove("NOWHERE"))
    put(tmp_path, "MAIL_KEY", VALUE)
    kept = vault(tmp_path)

    async def grants() -> None:
        for number in range(MOST_GRANTS + 1):
            await kept.grant("MAIL_KEY", SecretGrant(f"user/local/tool_{number}", ""))

    with pytest.raises(TooLarge):
        asyncio.run(grants())
    assert len(kept.named("MAIL_KEY").grants) == MOST_GRANTS
    asyncio.run(kept.revoke("MAIL_KEY", lambda _: True))
    assert vault(tmp_path).named("MAIL_KEY").grants == ()


def test_a_list_with_an_unknown_form_is_refused_and_not_read_as_the_default(tmp_path: Path) -> None:
    sealed = EncryptedRecords(tmp_path / "secrets", vault_key(tmp_path), remedy="")
    row: JsonObject = {"version": 1, "hosts": [], "form": "everything", "grants": []}
    sealed.write("list", EncryptedRecord({"last": 1, "secrets": {"MAIL_KEY": row}}, {}))

    with pytest.raises(StoreDamaged, match="form"):
        vault(tmp_path).all()
