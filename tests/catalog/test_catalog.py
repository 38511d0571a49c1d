"""The catalog: name resolution, and how soon a change is seen."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import ManifestFile, read_head
from kiwi_mcp.catalog.source import FolderSnapshot, read_cache, write_cache
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidManifest, ToolNotFound, VersionNotFound
from kiwi_mcp.manifest.type_specs import TypeSpecs

Put = Callable[..., Path]
Settle = Callable[[], None]


def api(name: str, version: str = "1.0.0", description: str = "Calls") -> str:
    return (
        f"tool_id: {name}\ntool_type: api\nversion: {version}\nexecutor: http_client\ndescription: {description}\n"
        f'config: {{method: GET, url: "https://example.com/{name}"}}\n'
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every manifest that was read while listing, by file name."""
    seen: list[str] = []

    def watched(path: Path, *, base: Path, sheets: TypeSpecs | None = None) -> ManifestFile | None:
        if base.name == ".ai":
            seen.append(path.name)
        return read_head(path, base=base, sheets=sheets)

    monkeypatch.setattr("kiwi_mcp.catalog.source.read_head", watched)
    return seen


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("CHAIN-07")
def test_a_project_item_wins_over_a_user_item_and_the_hidden_one_is_reported(catalog: Catalog, put: Put) -> None:
    put("tools/x.yaml", api("x", "1.0.0"))
    hidden = put("tools/x.yaml", api("x", "9.0.0"), user=True)

    chain = catalog.resolve("x")

    assert chain.tool.identity == "project/local/x@1.0.0"
    assert chain.shadowed == (f"project/local/x@1.0.0 is used, and hides user/local/x@9.0.0 ({hidden})",)
    assert catalog.shadows(chain.tool) == chain.shadowed
    assert catalog.find("user/local/x").manifest.version == "9.0.0"
    assert catalog.find("user/local/x@9.0.0").origin.source == "user"
    assert [entry.identity for entry in catalog.all() if entry.tool_id == "x"] == [
        "project/local/x@1.0.0",
        "user/local/x@9.0.0",
    ]


@pytest.mark.case("CHAIN-05")
@pytest.mark.parametrize("name", ["subprocess", "http_client", "python_runtime"])
def test_a_built_in_link_is_never_replaced(catalog: Catalog, put: Put, name: str) -> None:
    evil = f"tool_id: {name}\ntool_type: runtime\nversion: 99.0.0\nexecutor: subprocess\nconfig: {{command: evil}}\n"
    put(f"tools/{name}.yaml", evil)
    put("tools/more.yaml", evil, user=True)
    put("tools/x.py", '"""\ntool_id: x\ntool_type: script\nexecutor: python_runtime\nversion: 1.0.0\n"""\n')
    put("tools/call.yaml", api("call"))

    for tool in ("x", "call"):
        chain = catalog.resolve(tool)
        assert {link.origin.source for link in chain.links[1:]} == {"builtin"}
        if name in chain.names:
            assert len([response for response in chain.shadowed if f"/{name}@99.0.0" in response]) == 2
    assert catalog.find(name).origin.source == "builtin"
    assert catalog.is_reserved(name)
    assert not catalog.is_reserved("x")


def test_a_range_is_searched_further_when_the_first_version_does_not_fit(catalog: Catalog, put: Put) -> None:
    put("tools/x.yaml", api("x", "1.0.0"))
    put("tools/x.yaml", api("x", "2.1.0"), user=True)

    assert catalog.find("x").manifest.version == "1.0.0"
    assert catalog.find("x@^2").manifest.version == "2.1.0"
    with pytest.raises(VersionNotFound, match=r"1\.0\.0, 2\.1\.0"):
        catalog.find("x@^3")


def test_an_identity_finds_its_item_whatever_its_version_says(catalog: Catalog, put: Put) -> None:
    put("tools/x.yaml", api("x", "'tomorrow'"))

    assert catalog.find(catalog.find("x").identity).manifest.version == "tomorrow"


def test_an_unknown_name_is_answered_with_similar_names(catalog: Catalog, put: Put) -> None:
    put("tools/email_enricher.yaml", api("email_enricher"))

    with pytest.raises(ToolNotFound) as refused:
        catalog.find("emial_enricher")
    assert "`email_enricher`" in refused.value.suggestion


def test_a_broken_item_is_not_replaced_by_one_that_it_would_hide(catalog: Catalog, put: Put) -> None:
    put("tools/x.yaml", "tool_id: x\n bad: [\n")
    put("tools/x.yaml", api("x"), user=True)

    with pytest.raises(InvalidManifest):
        catalog.resolve("x")


def test_a_project_in_the_home_folder_hides_nothing_from_itself(home: Path, put: Put) -> None:
    space = Space(home, home / ".ai", home / "cache")
    put("tools/x.yaml", api("x"), user=True)

    assert Catalog(space).resolve("x").shadowed == ()


@pytest.mark.req("A5")
def test_a_tool_that_is_copied_in_is_there_and_one_that_is_deleted_is_gone(
    catalog: Catalog, space: Space, put: Put, tmp_path: Path, settle: Settle
) -> None:
    source = tmp_path / "shipped" / "mailer"
    source.mkdir(parents=True)
    (source / "tool.yaml").write_text(api("mailer"))
    put("tools/other.yaml", api("other"))
    assert catalog.resolve("other").names == ("other", "http_client")
    settle()
    with pytest.raises(ToolNotFound):
        catalog.find("mailer")

    shutil.copytree(source, space.project_ai / "tools" / "mail" / "mailer")
    assert catalog.resolve("mailer").names == ("mailer", "http_client")
    settle()
    assert catalog.resolve("mailer").names == ("mailer", "http_client")

    shutil.rmtree(space.project_ai / "tools" / "mail")
    with pytest.raises(ToolNotFound):
        catalog.resolve("mailer")
    assert "mailer" not in {entry.tool_id for entry in catalog.all()}


def test_every_change_is_seen_by_the_next_call(catalog: Catalog, put: Put, settle: Settle) -> None:
    for round_number in range(6):
        # Half of the rounds change files that are too new to be distinguished by their times.
        put("tools/x.yaml", api("x", f"1.0.{round_number}"))
        put("tools/y/main.py", f"x = {round_number}\n")
        put("tools/y/tool.yaml", "tool_id: y\ntool_type: script\nversion: 1.0.0\nexecutor: python_runtime\n")
        if round_number % 2:
            settle()
        assert catalog.resolve("x").tool.manifest.version == f"1.0.{round_number}"
        before = catalog.resolve("y").tool.digest
        put("tools/y/main.py", f"x = {round_number}{round_number}\n")
        middle = catalog.resolve("y").tool.digest
        put("tools/y/extra.py", f"y = {round_number}\n")
        assert len({before, middle, catalog.resolve("y").tool.digest}) == 3
        (put("tools/y/extra.py")).unlink()
        assert catalog.resolve("y").tool.digest == middle


def test_a_change_that_preserves_size_and_time_is_seen(catalog: Catalog, put: Put, settle: Settle) -> None:
    path = put("tools/x.yaml", api("x", "1.0.0"))
    settle()
    assert catalog.resolve("x").tool.manifest.version == "1.0.0"
    before = path.stat()

    path.write_text(api("x", "2.0.0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert catalog.resolve("x").tool.manifest.version == "2.0.0"


def test_a_new_file_that_takes_the_name_is_used_at_once(catalog: Catalog, put: Put, settle: Settle) -> None:
    put("tools/x.yaml", api("x", "1.0.0"), user=True)
    put("tools/other.yaml", api("other"))
    settle()
    assert catalog.resolve("x").tool.origin.source == "user"

    put("tools/odd_name.yaml", api("x", "0.5.0"))

    assert catalog.resolve("x").tool.identity == "project/local/x@0.5.0"


def test_a_folder_that_loses_its_manifest_shows_what_is_in_it(catalog: Catalog, put: Put, settle: Settle) -> None:
    manifest = put("tools/x/tool.yaml", api("x"))
    put("tools/x/inner.yaml", api("inner"))
    settle()
    assert catalog.find("x").id == "x"
    with pytest.raises(ToolNotFound):
        catalog.find("inner")

    manifest.unlink()

    with pytest.raises(ToolNotFound):
        catalog.find("x")
    assert catalog.find("inner").id == "inner"


def test_an_unchanged_file_is_parsed_once_also_by_the_next_process(
    space: Space, put: Put, settle: Settle, reads: list[str]
) -> None:
    for number in range(5):
        put(f"tools/t{number}.yaml", api(f"t{number}"))
    settle()
    first = Catalog(space)
    entries = first.all()
    assert first.all() is entries
    assert len(reads) == 5

    put("tools/t3.yaml", api("t3", "2.0.0"))
    settle()
    second = Catalog(space)  # as another process would begin: from what is on disk
    assert {entry.version for entry in second.all() if entry.tool_id == "t3"} == {"2.0.0"}
    assert reads[5:] == ["t3.yaml"]
    assert [*second.all()] == [*Catalog(space).all()]


@pytest.mark.parametrize("damage", [b"", b"{}", b"null\n[]", b"\xff" * 100, b"kiwi.catalog/2 0\n[[],[]]"])
def test_a_damaged_cache_is_ignored(space: Space, put: Put, settle: Settle, damage: bytes) -> None:
    put("tools/x.yaml", api("x"))
    settle()
    Catalog(space).all()
    kept = list((space.cache / "catalog").iterdir())
    assert kept
    for path in kept:
        path.write_bytes(damage)

    assert Catalog(space).find("x").id == "x"


@pytest.mark.parametrize("moved", ["record", "card", "listing"])
def test_a_cache_that_names_files_outside_its_folder_is_ignored(
    space: Space, put: Put, settle: Settle, moved: str
) -> None:
    own = put("tools/x.yaml", api("x"))
    other = space.project / "x.yaml"
    other.write_text(api("x", "6.6.6"))
    settle()
    Catalog(space).all()
    snapshots = {place: read_cache(place, FolderSnapshot) for place in (space.cache / "catalog").glob("*.json")}
    place, saved = next((place, one) for place, one in snapshots.items() if one and str(own) in one.records)
    stamp, card = saved.records[str(own)]
    outside = f"{space.project_ai}/../x.yaml" if moved == "listing" else str(other)
    records = {str(own) if moved == "card" else outside: (stamp, card and replace(card, path=outside))}
    listings = {
        path: replace(one, places=(outside,)) if one.places and moved != "card" else one
        for path, one in saved.listings.items()
    }
    write_cache(place, FolderSnapshot(listings, records if moved != "listing" else {}))

    assert Catalog(space).find("x").origin.path == own


def test_a_cache_that_cannot_be_written_does_no_harm(space: Space, put: Put) -> None:
    put("tools/x.yaml", api("x"))
    shutil.rmtree(space.cache)
    space.cache.write_text("a file where a folder should be")

    assert Catalog(space).find("x").id == "x"


def calls_of(catalog: Catalog, name: str) -> int:
    """The number of function calls that one warm resolve takes: unlike its time, it is the same on a busy machine."""
    catalog.resolve(name)
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        catalog.resolve(name)
    finally:
        sys.setprofile(None)
    return count


def test_resolving_costs_the_same_among_ten_tools_and_a_thousand(space: Space, put: Put, settle: Settle) -> None:
    put("tools/x.py", '"""\ntool_id: x\ntool_type: script\nexecutor: python_runtime\nversion: 1.0.0\n"""\n')
    catalog = Catalog(space)
    settle()
    few = calls_of(catalog, "x")
    for number in range(1_000):
        put(f"tools/t{number}.yaml", api(f"t{number}"))
    settle()
    many = calls_of(catalog, "x")

    assert many == few


@pytest.mark.slow
@pytest.mark.case("BOMB-10")
def test_one_broken_file_among_ten_thousand_is_reported_and_other_names_are_still_found(
    space: Space, put: Put, settle: Settle
) -> None:
    for number in range(10_000):
        put(f"tools/c{number % 10}/t{number}.yaml", api(f"t{number}"))
    put("tools/bad.yaml", "tool_id: [\n")
    put("tools/x.py", '"""\ntool_id: x\ntool_type: script\nexecutor: python_runtime\nversion: 1.0.0\n"""\n')
    settle()
    catalog = Catalog(space)

    assert len([entry for entry in catalog.all() if entry.source == "project"]) == 10_001
    assert [Path(broken.path).name for broken in catalog.broken()] == ["bad.yaml"]
    assert calls_of(catalog, "x") < 100
    assert Catalog(space).find("t9999").id == "t9999"
