"""Drafts: an item on disk whole or not at all."""

from __future__ import annotations

from collections import UserDict
from collections.abc import ItemsView, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import AlreadyExists, InvalidManifest, TooLarge
from kiwi_mcp.kernel.authoring.drafts import MAX_FILES, Draft, contents, discard, dump_manifest, write


class Rival(UserDict[str, bytes]):
    """Files during whose writing somebody else takes the name."""

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
def test_who_comes_second_in_the_same_moment_writes_over_nothing(
    place: str, manifest: str, taken: str, tmp_path: Path
) -> None:
    draft = Draft(place, manifest, Rival({manifest: b"second"}, tmp_path / taken))

    with pytest.raises(AlreadyExists):
        write(draft, tmp_path)

    assert (tmp_path / taken).read_bytes() == b"first"
    assert names(tmp_path) == [taken]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    draft = Draft("tools/say", "tool.yaml", {"tool.yaml": b"x", "a": b"x", "a/b": b"x"})

    with pytest.raises(OSError, match="a"):
        write(draft, tmp_path)

    assert names(tmp_path) == []


def test_what_is_discarded_twice_is_kept_twice(tmp_path: Path) -> None:
    for text in ("one", "two"):
        (tmp_path / "say.yaml").write_text(text)
        discard(tmp_path / "say.yaml", tmp_path)

    assert {path.read_text() for path in (tmp_path / ".trash").rglob("say.yaml")} == {"one", "two"}


def test_files_may_be_bytes_and_every_fault_is_listed() -> None:
    assert contents({"a.bin": {"base64": "AP8="}, "b.txt": "ž"}) == {"a.bin": b"\0\xff", "b.txt": "ž".encode()}
    with pytest.raises(InvalidManifest) as refused:
        contents({"../a": "x", "b": 3, "c": {"base64": "?"}, "d": "\ud800", "E": "x", "e": "x"})
    assert [issue.place for issue in refused.value.issues] == [
        "files['../a']",
        "files['b']",
        "files['c']",
        "files['d']",
        "files['e']",
    ]


def test_an_item_has_limits() -> None:
    with pytest.raises(TooLarge):
        contents({f"f{number}": "" for number in range(MAX_FILES + 1)})
    with pytest.raises(TooLarge):
        contents({"a": "x" * 16_000_001})


def test_a_manifest_is_written_as_a_person_would() -> None:
    manifest = {"tool_id": "say", "version": "1.0.0", "description": "Žluťoučký", "tags": ["a", "b"], "text": "1\n2\n"}

    assert dump_manifest(manifest).decode() == (
        "tool_id: say\nversion: 1.0.0\ndescription: Žluťoučký\ntags:\n  - a\n  - b\ntext: |\n  1\n  2\n"
    )
