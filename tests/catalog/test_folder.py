"""The folder source: which files are items, and hostile folders."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import KiwiError

Put = Callable[..., Path]

API = """\
tool_id: {name}
tool_type: api
version: 1.0.0
executor: http_client
description: Calls {name}
config: {{method: GET, url: "https://example.com/{name}"}}
"""

SCRIPT = '''\
"""
tool_id: {name}
tool_type: script
executor: python_runtime
version: 1.0.0
description: Runs {name}
"""


def main() -> int:
    return 1
'''


def names(catalog: Catalog) -> set[str]:
    return {entry.tool_id for entry in catalog.all() if entry.source != "builtin"}


def test_an_item_is_found_in_each_of_the_three_placements(catalog: Catalog, put: Put) -> None:
    put("tools/whole.yaml", API.format(name="whole"))
    put("tools/embedded.py", SCRIPT.format(name="embedded"))
    put("tools/mail/folder_tool/tool.yaml", API.format(name="folder_tool"))

    assert names(catalog) == {"whole", "embedded", "folder_tool"}
    assert [entry.category for entry in catalog.all() if entry.tool_id == "folder_tool"] == ["mail"]
    assert all(catalog.resolve(name).links[-1].origin.source == "builtin" for name in names(catalog))


def test_json_and_toml_files_are_items_too(catalog: Catalog, put: Put) -> None:
    put("tools/a.json", '{"tool_id": "a", "tool_type": "knowledge", "version": "1.0.0"}')
    put("tools/b.toml", 'tool_id = "b"\ntool_type = "knowledge"\nversion = "1.0.0"\n')

    assert names(catalog) == {"a", "b"}


@pytest.mark.parametrize(
    "path",
    [
        "tools/_private.yaml",
        "tools/.hidden.yaml",
        "tools/__init__.py",
        "tools/lib/shared.yaml",
        "tools/extractors/x.yaml",
        "tools/parsers/x.yaml",
        "tools/a/node_modules/x.yaml",
        "tools/a/.venv/x.yaml",
        "tools/a/__pycache__/x.yaml",
        "tools/README.md",
        "tools/package.json",
        "elsewhere/x.yaml",
    ],
)
def test_files_that_are_not_items_are_ignored(catalog: Catalog, put: Put, path: str) -> None:
    text = "{}" if path.endswith("package.json") else API.format(name="hidden")
    put(path, text)

    assert names(catalog) == set()
    assert catalog.broken() == []


def test_lib_below_a_category_is_an_ordinary_folder(catalog: Catalog, put: Put) -> None:
    put("tools/web/lib/x.yaml", API.format(name="x"))

    assert names(catalog) == {"x"}


@pytest.mark.req("K-TY-07")
def test_old_scripts_are_found_without_any_metadata(catalog: Catalog, put: Put) -> None:
    put("scripts/mail/send.py", "def main(to: str) -> str:\n    return to\n")

    assert names(catalog) == {"send"}
    chain = catalog.resolve("send")
    assert chain.names == ("send", "python_runtime", "subprocess")
    assert chain.tool.entrypoint == "send.py"


@pytest.mark.req("K-TY-07")
def test_a_tool_with_dunder_metadata_is_found(catalog: Catalog, put: Put) -> None:
    put(
        "tools/old.py",
        '__version__ = "1.2.0"\n__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n\n\ndef main(): ...\n',
    )

    assert catalog.resolve("old").names == ("old", "python_runtime", "subprocess")


def test_directives_and_knowledge_are_items_of_their_folders(catalog: Catalog, put: Put) -> None:
    put("knowledge/api/rest.md", "---\nid: rest\ntitle: REST\nversion: 1.0.0\nentry_type: pattern\n---\nUse nouns.\n")
    put("knowledge/notes.yaml", "tool_id: no\ntool_type: knowledge\nversion: 1.0.0\n")

    assert names(catalog) == {"rest"}
    assert catalog.resolve("rest").driver == "read"
    assert [entry.tool_id for entry in catalog.all() if entry.kind == "knowledge"] == ["rest"]


@pytest.mark.case("BOMB-10")
def test_a_broken_file_is_reported_and_the_others_are_found(catalog: Catalog, put: Put) -> None:
    for number in range(20):
        put(f"tools/t{number}.yaml", API.format(name=f"t{number}"))
    bad = put("tools/bad.yaml", "tool_id: bad\n  tool_type: [\n")

    assert names(catalog) == {f"t{number}" for number in range(20)}
    (broken,) = catalog.broken()
    assert broken.path == str(bad)
    assert broken.error.message

    with pytest.raises(KiwiError) as refused:
        catalog.find("bad")
    assert refused.value.code == "invalid_manifest"


def test_a_fixed_file_is_found_at_once(catalog: Catalog, put: Put) -> None:
    put("tools/bad.yaml", "tool_id: bad\n  tool_type: [\n")
    with pytest.raises(KiwiError):
        catalog.find("bad")

    put("tools/bad.yaml", API.format(name="bad"))

    assert catalog.find("bad").id == "bad"
    assert catalog.broken() == []


@pytest.mark.case("PATH-01")
@pytest.mark.parametrize("name", ["../x", "a/b/c", "", ".", "con", "x" * 300, "a\0b", "Upper", "ünï"])
def test_an_invalid_item_name_is_refused_everywhere(catalog: Catalog, put: Put, name: str) -> None:
    for ask in (catalog.find, catalog.resolve):
        with pytest.raises(KiwiError) as refused:
            ask(name)
        assert refused.value.code == "invalid_request"

    if name and "\0" not in name:
        put("tools/odd.yaml", API.format(name="good").replace("tool_id: good", f"tool_id: {name!r}"))
        assert names(catalog) == set()
        assert "cannot name an item" in catalog.broken()[0].error.message


def test_pipes_sockets_links_and_huge_files_neither_block_nor_become_items(
    catalog: Catalog, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = put("tools/good.yaml", API.format(name="good")).parent
    os.mkfifo(tools / "pipe.yaml")
    outside = tmp_path / "outside.yaml"
    outside.write_text(API.format(name="outside"))
    (tools / "link.yaml").symlink_to(outside)
    (tools / "linked").symlink_to(tmp_path)
    (tools / "device.yaml").symlink_to("/dev/zero")
    with (tools / "huge.yaml").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.chdir(tools)  # a socket's address holds about a hundred characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.yaml")
        found = names(catalog)

    assert found == {"good"}
    reported = {Path(broken.path).name: broken.error.code for broken in catalog.broken()}
    assert reported == {
        "link.yaml": "invalid_manifest",
        "linked": "invalid_manifest",
        "device.yaml": "invalid_manifest",
        "huge.yaml": "too_large",
    }


def test_a_folder_of_items_that_is_itself_a_link_is_not_entered(catalog: Catalog, space: Space, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.yaml").write_text(API.format(name="x"))
    (space.project_ai / "tools").symlink_to(tmp_path / "elsewhere")

    assert names(catalog) == set()


def test_binary_files_beside_items_are_not_items(catalog: Catalog, put: Put) -> None:
    put("tools/picture.bin").write_bytes(b"\x89PNG\0\xff\xfe")
    put("tools/latin.yaml").write_bytes(b"tool_id: x\ndescription: caf\xe9\n")

    assert names(catalog) == set()
    assert [Path(broken.path).name for broken in catalog.broken()] == ["latin.yaml"]


def test_a_manifest_at_the_top_of_tools_asks_for_a_folder(catalog: Catalog, put: Put) -> None:
    put("tools/tool.yaml", API.format(name="x"))

    assert names(catalog) == set()
    assert "folder of its own" in catalog.broken()[0].error.message


def test_a_folder_that_was_listed_before_it_got_its_manifest_is_an_item(space: Space, put: Put) -> None:
    (space.project_ai / "tools" / "later").mkdir(parents=True)
    put("tools/first.yaml", API.format(name="first"))
    assert names(Catalog(space)) == {"first"}
    put("tools/later/tool.yaml", API.format(name="later"))
    catalog = Catalog(space)
    assert names(catalog) == {"first", "later"}
    assert catalog.broken() == []


def test_deeply_nested_folders_are_cut_off(catalog: Catalog, put: Put) -> None:
    put(f"tools/{'/'.join('d' for _ in range(40))}/x.yaml", API.format(name="x"))
    put("tools/near.yaml", API.format(name="near"))

    assert names(catalog) == {"near"}
    assert "deep" in catalog.broken()[0].error.message


@pytest.mark.slow
@given(data=st.binary(max_size=400), name=st.sampled_from(["x.yaml", "x.json", "x.toml", "x.py", "x.sh", "x.rs"]))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_single_file_stops_the_listing(space: Space, put: Put, data: bytes, name: str) -> None:
    put("tools/good.yaml", API.format(name="good"))
    path = put(f"tools/{name}")
    path.write_bytes(b"tool_id: x\n" + data if data[:1] > b"\x80" else data)
    try:
        assert "good" in names(Catalog(space))
    finally:
        path.unlink()
