"""Invariants of a registry after any sequence of changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import NotFound, VersionConflict
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.registry import Actor, ReleaseFile, VersionName
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease

ANN = Actor("ann", ("team",))
VERSIONS = ["0.1.0", "1.0.0-rc.1", "1.0.0", "1.2.0", "1.10.0", "2.0.0-a", "2.0.0-a.1"]
steps = st.lists(
    st.tuples(st.sampled_from(["publish", "change", "yank", "unyank"]), st.sampled_from(VERSIONS)), max_size=12
)


def release(version: str, text: str) -> CheckedRelease:
    manifest = b"tool_id: item\n"
    statement = {
        "kind": "kiwi.item/1",
        "tool_id": "item",
        "version": version,
        "executor": None,
        "manifest": sha256(manifest).hexdigest(),
        "files": [{"path": "main.py", "sha256": sha256(text.encode()).hexdigest(), "executable": False}],
    }
    return CheckedRelease(
        name=VersionName("team", "item", version),
        place="tools/item/tool.yaml",
        statement=json.dumps(statement, sort_keys=True, separators=(",", ":")).encode(),
        manifest={"tool_id": "item", "tool_type": "primitive", "version": version},
        files=(ReleaseFile("main.py", text.encode()), ReleaseFile("tool.yaml", manifest)),
    )


def take(registry: Registry, op: str, version: str, yanked: dict[str, bool]) -> None:
    """Make one change, and keep the model of what should be there."""
    name = VersionName("team", "item", version)
    try:
        match op:
            case "publish":
                registry.publish([release(version, "one")])
                yanked.setdefault(version, False)
            case "change":
                registry.publish([release(version, "other")])
                yanked.setdefault(version, False)
            case "yank":
                registry.set_status([name], "yank")
                yanked[version] = True
            case _:
                registry.set_status([name], "unyank")
                yanked[version] = False
    except VersionConflict:
        assert version in yanked
    except NotFound:
        assert version not in yanked


def latest_of(yanked: dict[str, bool]) -> str:
    """The latest version, as the rule says it."""

    def newest(versions: Sequence[str]) -> str:
        return max(versions, key=lambda text: Version.parse(text) or Version(0, 0, 0))

    usable = [version for version, is_yanked in yanked.items() if not is_yanked]
    releases = [version for version in usable if "-" not in version]
    return newest(releases or usable or [*yanked])


@pytest.mark.slow
@given(steps)
@settings(deadline=None, max_examples=25)
def test_there_is_always_exactly_one_correct_latest_version(changes: list[tuple[str, str]]) -> None:
    with TemporaryDirectory() as folder:
        database = open_database(f"sqlite://{Path(folder).resolve()}/registry.db")
        registry, yanked = Registry(database, ANN), dict[str, bool]()
        for op, version in changes:
            take(registry, op, version, yanked)
            listed = registry.named("item")
            assert [one.name.version for one in listed if one.is_latest] == ([latest_of(yanked)] if yanked else [])
            assert [one.name.version for one in listed] == [v for v in reversed(VERSIONS) if v in yanked]
        assert [*registry.verify()] == []
        assert registry.head() == len(registry.events())
        database.close()
