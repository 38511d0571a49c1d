"""Shared caches: a sandboxed tool reads them and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.kernel import Kernel

Tree = Callable[[Path], Mapping[str, str]]
CODE = """
import errno, os, sys
from pathlib import Path

def main(places: list) -> dict:
    \"\"\"Try to leave something in every place.\"\"\"
    own = str(Path(__file__).parent)
    return {place: tried(place) for place in [own, sys.prefix, *places]}

def tried(place):
    results = []
    for attempt in (
        lambda: Path(place, "planted.pth").write_text("import os"),
        lambda: Path(place, "planted").symlink_to("/etc"),
        lambda: os.chmod(place, 0o777),
        lambda: os.rename(place, place + ".gone"),
    ):
        try:
            attempt()
            results.append("worked")
        except OSError as fault:
            results.append(errno.errorcode[fault.errno])
    return results
"""


def made(files: Mapping[str, str]) -> Mapping[str, str]:
    """What is made for tools; what Kiwi remembers of the folders it has read changes with every look."""
    return {path: digest for path, digest in files.items() if not path.startswith("kiwi/catalog/")}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("RACE-04")
async def test_a_tool_changes_no_shared_cache(project: Path, home: Path, tree: Tree) -> None:
    cache = home / ".cache"
    places = [cache / "kiwi", cache / "pip", cache / "uv", cache / "kiwi" / "environments", home / ".npm"]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        (place / "known").write_text("as it was")
    folder = project / ".ai" / "tools" / "planter"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(CODE)
    manifest = {
        "tool_id": "planter", "tool_type": "script", "executor": "python_runtime", "version": "1.0.0",
        "description": "Plant something", "config": {"entrypoint": "main.py"},
        "parameters": [{"name": "places", "type": "array", "required": True}],
    }  # fmt: skip
    (folder / "tool.yaml").write_text(json.dumps(manifest))

    async def story() -> tuple[JsonObject, Mapping[str, str], JsonObject]:
        kernel = Kernel(project)
        request: JsonObject = {"item_id": "planter", "parameters": {"places": [str(place) for place in places]}}
        try:
            await kernel.call("execute", {"action": "sign", "item_id": "planter"})
            first = (await kernel.call("execute", request)).content  # what is made for it is there now
            before = made(tree(cache))
            return first, before, (await kernel.call("execute", request)).content
        finally:
            await kernel.aclose()

    first, before, second = await story()

    for answer in (first, second):
        assert answer["status"] == "success", answer
        assert as_object(answer["isolation"])["used"] == "sandboxed"
        response = as_object(answer["result"])
        assert len(response) == len(places) + 2
        # Parent folders of a grant are private and in memory: changes there are not visible outside.
        assert [place for place, tries in response.items() if "worked" in str(tries)] in ([], [str(cache / "kiwi")]), (
            response
        )
    assert made(tree(cache)) == before
    assert not [path for path in home.rglob("*") if path.name.startswith("planted") or path.name.endswith(".gone")]
