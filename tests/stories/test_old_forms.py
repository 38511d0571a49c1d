"""Forms of older manifests and requests: each works, or says what it does not do."""

from __future__ import annotations

import pytest
from tests.stories.conftest import House

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object


def script(house: House, result: str, **words: Json) -> None:
    manifest: JsonObject = {
        "tool_id": "probe", "tool_type": "script", "executor": "python_runtime", "version": "1.0.0",
        "description": "Probe", "config": {"entrypoint": "main.py"}, **words,
    }  # fmt: skip
    house.write("tools/probe/tool.yaml", manifest)
    house.write("tools/probe/main.py", f"def main():\n    return {result}\n")


@pytest.mark.req("K-TY-07", "K-ME-01")
async def test_a_client_may_call_a_tool_a_script(house: House, sandbox: None) -> None:
    executor: JsonObject = {"type": "python", "entrypoint": "main.py"}
    manifest: JsonObject = {"tool_id": "probe", "tool_type": "python", "version": "1.0.0", "executor": executor}
    house.write("scripts/probe/tool.yaml", {**manifest, "description": "Probe"})
    house.write("scripts/probe/main.py", "def main():\n    return 'ran'\n")
    about: JsonObject = {"item_type": "script", "item_id": "probe"}
    await house.own("execute", action="sign", **about)
    assert (await house.own("execute", action="run", **about))["result"] == "ran"
    assert (await house.own("load", **about))["identity"] == "project/local/probe@1.0.0"
    async with house.client() as client:
        found = (await client.call_tool("search", {"item_type": "script", "query": "probe"})).structured_content
        assert [card["name"] for card in found["results"]] == ["probe"]


@pytest.mark.req("K-RT-05")
@pytest.mark.parametrize(
    ("result", "outputs", "warning"),
    [
        ("{'n': 1}", {"type": "object", "properties": {"n": {"type": "integer"}}}, ""),
        ("{'n': 'x'}", {"type": "object", "properties": {"n": {"type": "integer"}}}, "result.n"),
        ("{'n': 'x'}", {"format": "json", "schema": {"type": "array"}}, "is not a list"),
        ("{'n': 'x'}", {"format": "json", "schema": "business_list"}, ""),
        ("[1]", {"format": "text"}, "is not text"),
        ("'some'", {"format": "text"}, ""),
        ("'notes.txt'", {"format": "file"}, ""),
        ("'/etc/passwd'", {"format": "file"}, "is not the path of a file"),
        ("'missing.txt'", {"format": "file"}, "is not the path of a file"),
        ("'\\0'", {"format": "file"}, "is not the path of a file"),
    ],
)
async def test_a_result_that_is_not_as_declared_is_given_with_a_warning(
    house: House, sandbox: None, result: str, outputs: JsonObject, warning: str
) -> None:
    (house.project / "notes.txt").touch()
    script(house, result, outputs=outputs)
    await house.own("execute", action="sign", item_id="probe")
    answer = await house.own("execute", item_id="probe")
    found = [str(one) for one in as_list(answer.get("warnings")) if "`outputs`" in str(one)]
    assert answer["status"] == "success"
    assert len(found) == bool(warning), answer.get("warnings")
    assert all(warning in one for one in found)


@pytest.mark.req("K-VA-02")
async def test_an_unknown_format_of_a_result_is_an_issue(house: House) -> None:
    script(house, "1", outputs={"format": "xml"})
    (issue,) = as_list((await house.own("execute", action="validate", item_id="probe"))["issues"])
    assert as_object(issue)["place"] == "outputs.format"


async def test_a_folder_for_environments_that_is_not_used_is_a_warning(house: House, sandbox: None) -> None:
    script(house, "1", config={"entrypoint": "main.py", "venv": {"enabled": True, "cache_dir": "~/elsewhere"}})
    answer = await house.own("execute", action="validate", item_id="probe")
    (issue,) = as_list(answer["warnings"])
    assert (as_object(issue)["place"], as_object(issue)["severity"]) == ("config.venv.cache_dir", "warning")
