"""A project is restored after any change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.kernel.checkpoints.file_changes import CheckpointRecord, changes, content, put, remove, survey

Tree = Mapping[str, tuple[str, bytes, int]]

names = st.sampled_from(["a", "b", "c.txt", "ünï", "new\nline"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
files = st.tuples(st.just("file"), st.binary(max_size=20), st.sampled_from([0o600, 0o644, 0o755]))
links = st.tuples(st.just("link"), st.sampled_from([b"a", b"../away", b"/"]), st.just(0))


def without_clashes(tree: Tree) -> Tree:
    """Leave out what stands below another entry."""
    return {path: kind for path, kind in tree.items() if not any(path.startswith(f"{other}/") for other in tree)}


trees = st.dictionaries(paths, files | links, max_size=6).map(without_clashes)


def lay(root: Path, tree: Tree) -> None:
    for path, (kind, data, mode) in tree.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            place.symlink_to(os.fsdecode(data))
        else:
            place.write_bytes(data)
            place.chmod(mode)


def clear(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def every_path(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("*")]


def standing(root: Path) -> dict[str, object]:
    paths = every_path(root)
    return dict(survey(root, paths, "sha256").entries)


@settings(max_examples=30, deadline=None)
@given(before=trees, after=trees)
def test_any_change_can_be_restored(before: Tree, after: Tree) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        lay(root, before)
        paths = every_path(root)
        saved = survey(root, paths, "sha256").entries
        kept = {entry.id: content(root, path, entry) for path, entry in saved.items()}
        clear(root)
        lay(root, after)
        paths = every_path(root)
        found = changes(saved, survey(root, paths, "sha256").entries)
        for change in sorted(found, key=lambda change: change.path, reverse=True):
            if change.before is None:
                remove(root, change.path)
        for change in found:
            if change.before is not None:
                put(root, change.path, change.before, kept[change.before.id] or b"")
        assert standing(root) == saved


@given(before=trees, after=trees)
@settings(max_examples=30, deadline=None)
def test_a_record_is_read_as_it_was_written(before: Tree, after: Tree) -> None:
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        sides = []
        for folder, tree in ((first, before), (second, after)):
            lay(Path(folder), tree)
            sides.append(survey(Path(folder), tree, "sha1").entries)
    record = CheckpointRecord(
        "01M7HMPWJZC9PCFHJ3AWDFDR55", "change", 1, saved=sides[0], scope=("a",), left_out=("b\udcff",)
    )
    for one in (record, record.ended(2, sides[1])):
        assert CheckpointRecord.of_text(one.to_text(), one.run_id) == one
        assert CheckpointRecord.of_text(one.to_text(), "01M7HMPWJZC9PCFHJ3AWDFDR56") is None
