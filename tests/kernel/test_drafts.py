"""Drafts: an item is written to disk atomically."""

from __future__ import annotations

from collections import UserDict
from collections.abc import ItemsView, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.catalog.item_writer import MAX_FILES, ItemDraft, contents, discard, dump_manifest, write
from kiwi_mcp.domain.errors import AlreadyExists, InvalidManifest, TooLarge, Unavailable


class Rival(UserDict[str, bytes]):
    """Files that let another writer take the name while they are written."""

    def __init__(self, files: Mapping[str, bytes], taken: Path) -> None:
        super().__init__(files)
        self._taken = taken

    def items(self) -> ItemsView[str, bytes]:
        self._taken.parent.mkdir(parents=True, exist_ok=True)
        self._taken.write_bytes(b"first")
        return super().items()


def names(folder: Path) -> list[str]:
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if not name.startswith("home/"))


@pytest.mark.parametrize(
    ("place", "manifest", "taken"),
    [
        ("tools/say", "tool.yaml", "tools/say/tool.yaml"),
        ("tools/say.yaml", "say.yaml", "tools/say.yaml"),
        ("tools/say", "tool.yaml", "tools/say"),
    ],
    ids=["a folder", "a file", "a folder where a file is"],
)
def test_the_second_of_two_concurrent_writers_overwrites_nothing(
    place: str, manifest: str, taken: str, tmp_path: Path
) -> None:
    draft = ItemDraft(place, manifest, Rival({manifest: b"second"}, tmp_path / taken))

    with pytest.raises(AlreadyExists):
        write(draft, tmp_path)

    assert (tmp_path / taken).read_bytes() == b"first"
    assert names(tmp_path) == [taken]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    draft = ItemDraft("tools/say", "tool.yaml", {"tool.yaml": b"x", "a": b"x", "a/b": b"x"})

    with pytest.raises(Unavailable, match="cannot be written"):
        write(draft, tmp_path)

    assert names(tmp_path) == []


def test_two_discarded_items_of_one_name_are_both_in_the_trash(tmp_path: Path) -> None:
    for text in ("one", "two"):
        (tmp_path / "say.yaml").write_text(text)
        discard(tmp_path / "say.yaml", tmp_path)

    assert {path.read_text() for path in (tmp_path / ".trash").rglob("say.yaml")} == {"one", "two"}


def test_files_may_be_bytes_and_every_issue_is_listed() -> None:
    assert contents({"a.bin": {"base64": "AP8="}, "b.txt": "ž"}) == {"a.bin": b"\0\xff", "b.txt": "ž".encode()}
    with pytest.raises(InvalidManifest) as refused:
        contents({"../a": "x", "b": 3, "c": {"base64": "?"}, "d": "\ud800", "é": {"base64": "é"}, "E": "x", "e": "x"})
    assert [issue.place for issue in refused.value.issues] == [
        "files['../a']",
        "files['b']",
        "files['c']",
        "files['d']",
        "files['é']",
        "files['e']",
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [("E.py", "e.py"), ("caf\u00e9.py", "cafe\u0301.py"), ("data", "data/a.txt"), ("Data", "data/a.txt")],
    ids=["case", "composed letters", "a file and a folder", "a file and a folder of another case"],
)
def test_file_names_that_collide_on_some_systems_are_refused(one: str, other: str) -> None:
    for sent in ({one: "x", other: "x"}, {other: "x", one: "x"}):
        with pytest.raises(InvalidManifest, match="cannot stand beside"):
            contents(sent)


def test_the_size_of_an_item_is_limited() -> None:
    with pytest.raises(TooLarge):
        contents({f"f{number}": "" for number in range(MAX_FILES + 1)})
    with pytest.raises(TooLarge):
        contents({"a": "x" * 16_000_001})


def test_a_manifest_is_written_in_readable_yaml() -> None:
    manifest = {"tool_id": "say", "version": "1.0.0", "description": "Žluťoučký", "tags": ["a", "b"], "text": "1\n2\n"}

    assert dump_manifest(manifest).decode() == (
        "tool_id: say\nversion: 1.0.0\ndescription: Žluťoučký\ntags:\n- a\n- b\ntext: |\n  1\n  2\n"
    )
