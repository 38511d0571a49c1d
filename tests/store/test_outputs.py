"""Outputs: one file per run, never overwritten, limited in number, and read by handle."""

from __future__ import annotations

import json
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.store.outputs import (
    INLINE_LIMIT,
    PREVIEW,
    Retention,
    StoredOutput,
    keep,
    preview,
    read_page,
    rewrite,
    shorten,
)

NOW = datetime(2026, 1, 28, 12, 0, 0, tzinfo=UTC)


def not_stored(run_id: str) -> bytes:
    raise NotFound(f"{run_id} is not stored.", suggestion="Run it.")


def no_check(_: str) -> None:
    """Let a page be read by any caller."""


def kept(folder: Path, number: int = 0, *, now: datetime = NOW, count: int = 50) -> StoredOutput:
    return keep(folder, "say", {"result": number}, now=now, retention=Retention(count))


@pytest.mark.req("K-RT-05")
def test_an_output_is_named_by_tool_and_time(tmp_path: Path) -> None:
    one = kept(tmp_path / ".ai", 7)

    assert one == StoredOutput(".ai/outputs/tools/say/output_20260128_120000.json", "say/output_20260128_120000")
    assert json.loads((tmp_path / one.path).read_text()) == {"result": 7}
    assert (tmp_path / one.path).stat().st_mode & 0o777 == 0o600


@pytest.mark.case("PATH-07")
def test_runs_in_the_same_second_have_different_names(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: kept(tmp_path / ".ai", number), range(40)))

    assert len({one.path for one in made}) == 40
    assert sorted(json.loads((tmp_path / one.path).read_text())["result"] for one in made) == list(range(40))


@pytest.mark.case("PATH-07")
def test_a_symlink_in_place_of_an_output_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / ".ai" / "outputs" / "tools" / "say"
    folder.mkdir(parents=True)
    (tmp_path / "victim").write_text("mine")
    (folder / "output_20260128_120000.json").symlink_to(tmp_path / "victim")

    one = kept(tmp_path / ".ai")

    assert (tmp_path / "victim").read_text() == "mine"
    assert one.path.endswith("_2.json")


@pytest.mark.req("K-RT-05")
def test_the_oldest_outputs_are_removed_above_the_limit(tmp_path: Path) -> None:
    for number in range(12):
        kept(tmp_path / ".ai", number, now=NOW + timedelta(seconds=number // 3), count=5)

    left = sorted((tmp_path / ".ai" / "outputs" / "tools" / "say").iterdir())
    results = sorted(json.loads(path.read_text())["result"] for path in left)
    assert results[-5:] == [7, 8, 9, 10, 11]
    assert len(results) <= 6  # a fifth more than is kept


def test_the_tenth_output_of_a_second_is_newer_than_the_second(tmp_path: Path) -> None:
    for number in range(12):
        kept(tmp_path / ".ai", number, count=3)

    left = (tmp_path / ".ai" / "outputs" / "tools" / "say").iterdir()
    assert sorted(json.loads(path.read_text())["result"] for path in left) == [9, 10, 11]


@pytest.mark.req("K-RT-05")
def test_a_small_result_is_returned_in_full_and_a_large_one_as_a_preview() -> None:
    handle = StoredOutput("path", "say/output_20260128_120000")

    assert shorten("x" * INLINE_LIMIT, handle) == {"result": "x" * INLINE_LIMIT}
    large = shorten("x" * (INLINE_LIMIT + 2), handle)
    assert large == {
        "result": "x" * PREVIEW,
        "result_is_preview": True,
        "result_handle": handle.handle,
        "result_characters": INLINE_LIMIT + 2,
    }
    assert shorten("x" * INLINE_LIMIT, None) == {"result": "x" * INLINE_LIMIT}


json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=25, deadline=None)
@given(value=json_values, length=st.integers(1, 50))
def test_the_pages_of_a_result_add_up_to_the_result(
    value: Json, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pages") / ".ai"
    one = keep(folder, "say", {"result": value}, now=NOW, retention=Retention())
    text, offset = "", 0
    for _ in range(10_000):
        page = read_page(folder, one.handle, offset=offset, length=length, stored=not_stored, check=no_check)
        text += str(page["content"])
        if page["next_offset"] is None:
            break
        offset = int(str(page["next_offset"]))

    assert (text if isinstance(value, str) else json.loads(text)) == value


@pytest.mark.parametrize(
    "handle", ["", "say", "../say/output_20260128_120000", "say/output_20260128_120000.json", "a/b/c"]
)
def test_an_invalid_handle_is_refused(handle: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        read_page(tmp_path, handle, offset=0, length=10, stored=not_stored, check=no_check)


def test_an_output_that_is_a_symlink_a_pipe_or_missing_is_not_read(tmp_path: Path) -> None:
    import_folder = tmp_path / "outputs" / "tools" / "say"
    import_folder.mkdir(parents=True)
    (tmp_path / "secret.json").write_text('{"result": "secret"}')
    (import_folder / "output_20260128_120000.json").symlink_to(tmp_path / "secret.json")
    (import_folder / "output_20260128_120001.json").mkdir()
    for second in range(3):
        with pytest.raises(NotFound):
            read_page(
                tmp_path, f"say/output_20260128_12000{second}", offset=0, length=10, stored=not_stored, check=no_check
            )


def test_a_damaged_output_is_not_found(tmp_path: Path) -> None:
    one = kept(tmp_path / ".ai")
    for text in ("{", "[]", "\xff"):
        (tmp_path / one.path).write_text(text, encoding="latin-1")
        with pytest.raises(NotFound):
            read_page(tmp_path / ".ai", one.handle, offset=0, length=10, stored=not_stored, check=no_check)


def test_a_record_is_replaced_atomically(tmp_path: Path) -> None:
    one = kept(tmp_path / ".ai", 7)
    rewrite(tmp_path / ".ai", one, {"result": 8})

    assert json.loads((tmp_path / one.path).read_text()) == {"result": 8}
    assert [path.name for path in (tmp_path / one.path).parent.iterdir()] == ["output_20260128_120000.json"]


def test_a_record_that_cannot_be_written_in_full_does_not_exist(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            keep(tmp_path / ".ai", "say", {"result": "x" * 5_000}, now=NOW, retention=Retention())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)

    assert list((tmp_path / ".ai" / "outputs" / "tools" / "say").iterdir()) == []


def test_a_large_result_is_read_from_the_store_by_its_run(tmp_path: Path) -> None:
    text = "käse \ud800" * 20_000
    results = {"the-run": text.encode(errors="surrogatepass"), "another": b"not it"}

    def page(run_id: str) -> JsonObject:
        record: JsonObject = {
            **preview(text),
            "run_id": run_id,
            "result_sha256": sha256(results["the-run"]).hexdigest(),
        }
        one = keep(tmp_path, "say", record, now=NOW, retention=Retention())
        return read_page(
            tmp_path, one.handle, offset=6, length=10, stored=results.__getitem__, check=results.__getitem__
        )

    response = page("the-run")
    assert (response["content"], response["total_characters"], response["next_offset"]) == (text[6:16], len(text), 16)
    with pytest.raises(NotFound):
        page("another")


def test_a_result_in_a_missing_store_is_not_found(tmp_path: Path) -> None:
    one = keep(tmp_path, "say", {"result": "x", "result_sha256": "0" * 64}, now=NOW, retention=Retention())

    with pytest.raises(NotFound):
        read_page(tmp_path, one.handle, offset=0, length=10, stored=not_stored, check=no_check)
