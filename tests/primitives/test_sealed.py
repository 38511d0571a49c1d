"""Encrypted records: readable only with the same key under the same name."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable
from kiwi_mcp.domain.json import Json, as_list
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.secrets import encrypted_records
from kiwi_mcp.primitives.secrets.encrypted_records import EncryptedRecord, EncryptedRecords
from kiwi_mcp.primitives.secrets.key_storage import file_key

FACTS: dict[str, Json] = {"issuer": "0ffice", "scopes": ["read"], "until": 1.5, "none": None}
RECORD = EncryptedRecord(FACTS, {"access": Secret("t0ken-value"), "refresh": Secret("0ther-value")})


def vault(folder: Path) -> EncryptedRecords:
    return EncryptedRecords(folder / "records", file_key(folder / "sealing.key"))


def opens(kept: EncryptedRecords, name: str = "mail") -> bool:
    """Whether a record is what was written."""
    found = kept.read(name)
    assert found is not None
    values = {word: secret.reveal() for word, secret in found.secrets.items()}
    return found.facts == FACTS and values == {"access": "t0ken-value", "refresh": "0ther-value"}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_record_is_readable_with_the_key(tmp_path: Path) -> None:
    assert vault(tmp_path).read("mail") is None
    vault(tmp_path).write("mail", RECORD)

    assert opens(vault(tmp_path))
    assert vault(tmp_path).read("other") is None


def test_the_files_reveal_nothing_of_a_record(tmp_path: Path) -> None:
    vault(tmp_path).write("https://mail.example", RECORD)

    for path in files(tmp_path):
        assert not any(word in path.read_bytes() for word in (b"t0ken", b"0ther", b"0ffice"))
        assert "mail" not in path.name
        assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "records").stat().st_mode & 0o077 == 0


def test_a_removed_record_is_gone(tmp_path: Path) -> None:
    vault(tmp_path).write("mail", RECORD)

    assert vault(tmp_path).remove("mail")
    assert not vault(tmp_path).remove("mail")
    assert vault(tmp_path).read("mail") is None


def test_a_changed_record_has_another_etag(tmp_path: Path) -> None:
    kept = vault(tmp_path)
    marks = [kept.mark("mail")]
    for number in range(3):
        kept.write("mail", EncryptedRecord({"number": number}, {}))
        marks.append(kept.mark("mail"))

    assert marks[0] is None
    assert len(set(marks)) == 4


@settings(max_examples=30, deadline=None)
@given(place=st.integers(min_value=0, max_value=10_000), change=st.integers(min_value=1, max_value=255))
def test_a_changed_byte_opens_nothing_and_loses_no_other_record(place: int, change: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = vault(Path(folder))
        kept.write("other", RECORD)
        before = set(files(Path(folder)))
        kept.write("mail", RECORD)
        [record] = set(files(Path(folder))) - before
        data = bytearray(record.read_bytes())
        data[place % len(data)] ^= change
        record.write_bytes(data)

        with pytest.raises(StoreDamaged):
            kept.read("mail")
        assert opens(kept, "other")


@pytest.mark.parametrize("content", [b"", b"x", b"kiwi sealed 1\n", b"kiwi sealed 1\n" + bytes(12), b"x" * 2_000_000])
def test_an_invalid_record_is_damaged_and_can_be_overwritten(tmp_path: Path, content: bytes) -> None:
    kept = vault(tmp_path)
    kept.write("mail", RECORD)
    [record] = (tmp_path / "records").glob("*.sealed")
    record.write_bytes(content)

    with pytest.raises(StoreDamaged):
        kept.read("mail")
    kept.write("mail", RECORD)
    assert opens(kept)


def test_a_record_file_in_place_of_another_does_not_open(tmp_path: Path) -> None:
    kept = vault(tmp_path)
    kept.write("mail", RECORD)
    [record] = (tmp_path / "records").glob("*.sealed")
    data = record.read_bytes()
    kept.write("bank", RECORD)
    for path in (tmp_path / "records").glob("*.sealed"):
        path.write_bytes(data)

    with pytest.raises(StoreDamaged):
        kept.read("bank")
    assert opens(kept)


def test_another_key_opens_nothing(tmp_path: Path) -> None:
    vault(tmp_path).write("mail", RECORD)
    (tmp_path / "sealing.key").unlink()

    with pytest.raises(StoreDamaged, match="another key"):
        vault(tmp_path).read("mail")


def test_a_truncated_key_is_reported_and_not_replaced(tmp_path: Path) -> None:
    vault(tmp_path).write("mail", RECORD)
    (tmp_path / "sealing.key").write_bytes(b"short")

    with pytest.raises(StoreDamaged, match="no key any more"):
        vault(tmp_path).write("mail", RECORD)
    assert (tmp_path / "sealing.key").read_bytes() == b"short"


def test_a_file_in_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("in the way")

    with pytest.raises(StoreUnavailable):
        vault(tmp_path).write("mail", RECORD)


async def test_concurrent_changes_of_a_record_see_each_other(tmp_path: Path) -> None:
    async def more(kept: EncryptedRecords) -> None:
        async with kept.held("count"):
            found = kept.read("count")
            numbers = [*as_list(found.facts["numbers"])] if found else []
            await asyncio.sleep(0)
            kept.write("count", EncryptedRecord({"numbers": [*numbers, len(numbers)]}, {}))

    await asyncio.gather(*(more(vault(tmp_path)) for _ in range(10)))
    found = vault(tmp_path).read("count")
    assert found is not None
    assert found.facts["numbers"] == [*range(10)]


@pytest.mark.usefixtures("processes")
async def test_waiting_for_a_record_locked_by_another_process_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encrypted_records, "PATIENCE", 0.2)

    async def scenario() -> int:
        async with vault(tmp_path).held("mail"):
            [lock] = (tmp_path / "records").glob("*.lock")
            other = f"import fcntl; fcntl.flock(open({str(lock)!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
            taking = await asyncio.create_subprocess_exec(
                sys.executable, "-c", other, stderr=asyncio.subprocess.DEVNULL
            )
            code = await taking.wait()
            with pytest.raises(StoreUnavailable, match="Another process"):
                async with vault(tmp_path).held("mail"):
                    pass
        async with vault(tmp_path).held("mail"):
            return code

    assert await scenario() == 1
