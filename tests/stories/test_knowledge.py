"""Knowledge: checked before it is signed, found by the text of its parts, linked to other entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.kernel import Kernel

pytestmark = pytest.mark.usefixtures("processes", "home")
HEAD = "---\nid: {0}\ntitle: {1}\nversion: 1.0.0\nentry_type: reference\n{2}---\n"


@pytest.fixture
async def kernel(project: Path, anyio_backend: str) -> Any:
    kernel = Kernel(project)
    yield kernel
    await kernel.aclose()


def put(project: Path, name: str, text: str, title: str = "A title", front: str = "") -> None:
    folder = project / ".ai" / "knowledge"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(HEAD.format(name, title, front) + text)


async def do(kernel: Kernel, verb: str, **words: Any) -> dict[str, Any]:
    return dict((await kernel.call(verb, {"item_type": "knowledge", **words}, Caller(is_owner=True))).content)


@pytest.mark.req("K-DI-03")
async def test_a_text_is_found_by_its_parts_and_loaded_part_by_part(kernel: Kernel, project: Path) -> None:
    filler = "".join(f"## Chapter {number}\n\nNothing about that here, only {number}.\n\n" for number in range(3))
    put(
        project,
        "database_notes",
        f"{filler}## Paging\n\nThe rows move with the cursor, see [[retries]].\n",
        "Databases",
    )
    put(project, "retries", "Try again twice. Back to [[database_notes]] or [[nowhere]].\n", "Retries")

    found = await do(kernel, "search", query="rows move cursor")
    (first, *others) = found["results"]
    assert (first["name"], first["section"]) == ("database_notes", "#4")
    assert first["path"].endswith("database_notes.md")
    assert "database_notes" not in {one["name"] for one in others}
    part = await do(kernel, "load", item_id="database_notes", file=first["section"])
    assert part["content"].startswith("## Paging\n\nThe rows move")
    assert (await do(kernel, "load", item_id="database_notes", file="#paging"))["content"] == part["content"]
    missing = await do(kernel, "load", item_id="database_notes", file="#9")
    assert "#Paging" in missing["suggestion"]
    listed = await do(kernel, "search", query="*")
    assert [one["name"] for one in listed["results"]] == ["database_notes", "retries"]

    # An edit is found at once; what was removed is not.
    put(project, "retries", "Wait for a purple light.\n", "Retries")
    assert (await do(kernel, "search", query="purple light"))["results"][0]["name"] == "retries"
    loaded = await do(kernel, "load", item_id="database_notes")
    assert loaded["links"] == {"retries": "project/local/retries@1.0.0"}
    assert "backlinks" not in loaded


@pytest.mark.req("K-DI-03")
async def test_links_are_resolved_broken_ones_warned_about_and_backlinks_shown(kernel: Kernel, project: Path) -> None:
    put(project, "one", "See [[two]] and [[nowhere|the other]].\n")
    put(project, "two", "See nothing.\n")
    loaded = await do(kernel, "load", item_id="one")
    assert (loaded["links"], loaded["broken_links"]) == ({"two": "project/local/two@1.0.0"}, ["nowhere"])
    assert (await do(kernel, "load", item_id="two"))["backlinks"] == ["one"]
    checked = await do(kernel, "execute", action="validate", item_id="one")
    assert checked["valid"]
    assert [one["reason"] for one in checked["warnings"]] == ["[[nowhere]] leads nowhere"]


@pytest.mark.req("K-VA-01")
@pytest.mark.parametrize(
    ("text", "front", "place"),
    [
        ("Text.\n", "", ""),
        ("", "", "body"),
        ("Text.\n", "schema: {type: object, required: [owner]}\n", "owner"),
        ("Text.\n", "owner: ann\nschema: {type: object, required: [owner]}\n", ""),
        ("Text.\n", "schema: {type: nonsense}\n", "schema"),
        ("Text.\n", "references: none\n", "config.references"),
    ],
)
async def test_an_entry_is_checked_before_it_is_signed(
    kernel: Kernel, project: Path, text: str, front: str, place: str
) -> None:
    put(project, "entry", text, front=front)
    signed = await do(kernel, "execute", action="sign", item_id="entry")
    if place:
        assert signed["code"] == "invalid_manifest"
        assert any(place in one["place"] or place in one["reason"] for one in signed["issues"]), signed["issues"]
    else:
        assert signed["status"] == "signed"


@pytest.mark.req("K-VA-01")
async def test_an_entry_needs_a_title_and_a_version(kernel: Kernel, project: Path) -> None:
    put(project, "entry", "Text.\n", title='""')
    assert "title" in str((await do(kernel, "execute", action="sign", item_id="entry"))["issues"])
    path = project / ".ai" / "knowledge" / "entry.md"
    path.write_text("---\nid: entry\ntitle: T\n---\nText.\n")
    assert "version" in str((await do(kernel, "execute", action="sign", item_id="entry"))["issues"])
    path.write_text("---\nid: entry\nversion: 1.0.0\n---\n# A heading is a title\n\nText.\n")
    assert (await do(kernel, "execute", action="sign", item_id="entry"))["status"] == "signed"
