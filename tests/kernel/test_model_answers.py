"""What a model reads: slips that are understood, suggestions by search, refusals that contain what is needed next."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Caller, Principal
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.surfaces.mcp.results import summarize

Ask = Callable[..., Answer]
SCRIPT = Path(__file__).parents[1] / "data" / "mcp" / "scripted.py"
ZONE: JsonObject = {"type": "object", "properties": {"timezone": {"type": "string"}}, "required": ["timezone"]}
CLOCK: JsonObject = {
    "tool_type": "script",
    "executor": "bash_runtime",
    "version": "1.0.0",
    "description": "Return the current time in a time zone",
    "parameters": [{"name": "timezone", "type": "string", "required": True}],
    "files": {"main.sh": 'echo "noon in $KIWI_PARAM_timezone"\n'},
}


def add_server(ask: Ask, tmp_path: Path, server: str, *tools: JsonObject) -> None:
    offers = tmp_path / "servers" / f"{server}.json"
    offers.parent.mkdir(exist_ok=True)
    offers.write_text(json.dumps({"by": server, "tools": tools}))
    args = [str(SCRIPT), str(offers), str(offers.parent)]
    assert not ask("mcp", action="add", server=server, command=sys.executable, args=args).is_error


@pytest.mark.usefixtures("sandbox")
def test_a_parameter_beside_parameters_is_taken_with_a_warning_if_the_tool_declares_it(ask: Ask) -> None:
    made = ask("execute", action="create", item_id="get_current_time", parameters=CLOCK)
    assert made.content["status"] == "created", made.content  # its only file is its entrypoint

    taken = ask("execute", item_id="get_current_time", timezone="Asia/Tokyo")

    assert taken.content["result"] == "noon in Asia/Tokyo"
    assert as_list(taken.content["warnings"])[-1] == (
        "`timezone` was taken as a parameter of the tool: put it inside `parameters`."
    )
    for request in ({"zone": "x"}, {"dryrun": True}, {"timezone": "x", "parameters": {"timezone": "y"}}):
        refused = ask("execute", item_id="get_current_time", **request).content
        assert refused["code"] == "invalid_request"
        assert "Put the tool's own arguments inside `parameters`." in as_text(refused["suggestion"])


@pytest.mark.usefixtures("sandbox")
def test_a_refusal_names_what_a_search_finds_and_contains_a_small_schema(ask: Ask, kernel: Kernel) -> None:
    ask("execute", action="create", item_id="get_current_time", parameters=CLOCK)
    ghost = {**CLOCK, "description": "Tell a ghost story", "parameters": []}
    ask("execute", action="create", item_id="ghost", parameters=ghost)

    unknown = ask("execute", item_id="get_time").content
    assert unknown["suggestion"] == "Did you mean `get_current_time`? If not, search for it."
    assert "ghost" not in as_text(ask("execute", item_id="shout").content["suggestion"])

    bob = Caller(name="bob", identity=Principal("agent", "bob"))
    refused = asyncio.run(kernel.call("execute", {"item_id": "shout"}, bob)).content
    assert "create" not in as_text(refused["suggestion"])

    invalid = ask("execute", item_id="get_current_time", parameters={"timezone": 3}).content
    assert as_object(as_object(invalid["parameters_schema"])["properties"]).keys() == {"timezone"}
    assert '"timezone":{"type":"string"}' in summarize(invalid)

    code = {"content": "print(1)\n", "filename": "shout.py"}
    draft = ask("execute", action="create", item_id="shout", parameters=code).content
    assert "draft-" not in as_text(draft["message"])
    assert "- shout.py: it holds no manifest." in summarize(draft)


@pytest.mark.usefixtures("sandbox")
def test_a_server_is_not_found_but_its_tools_are_once_each_and_its_name_runs_the_tool_of_that_name(
    ask: Ask, tmp_path: Path
) -> None:
    now: JsonObject = {"name": "get_current_time", "description": "Return the time", "inputSchema": ZONE}
    clock: JsonObject = {"name": "clock", "description": "Ring a bell", "inputSchema": {"type": "object"}}
    for server in ("clock", "clock_2"):
        add_server(ask, tmp_path, server, now, clock)
    ask("approvals", action="add_rule", item="mcp/*")

    found = ask("search", query="clock return the time", with_schema=True).content
    first, *others = (as_object(one) for one in as_list(found["results"]))
    assert (first["name"], first["also"]) == ("get_current_time", ["mcp/clock_2/get_current_time"])
    assert first["parameters"] == ZONE
    assert [one["name"] for one in others] == ["clock"]
    assert all(one["tool_type"] == "mcp_tool" and "parameters" not in one for one in others)
    assert "\n  parameters: {" in summarize(found)
    servers = ask("search", query="clock", tool_type="mcp_server").content
    assert {as_object(one)["name"] for one in as_list(servers["results"])} == {"clock", "clock_2"}

    rung = ask("execute", item_id="clock").content
    assert as_text(rung["identity"]).startswith("mcp/clock/clock@"), rung
    add_server(ask, tmp_path, "bell", now)
    assert ask("execute", item_id="bell").content["code"] == "not_callable"


@pytest.mark.usefixtures("sandbox")
def test_a_large_output_is_searched_by_line(ask: Ask) -> None:
    rows = "import json\n\n\ndef main():\n    return [{'n': n, 'text': f'row {n}\\nend {n}'} for n in range(4000)]\n"
    words = {"tool_type": "python", "version": "1.0.0", "description": "List rows", "executor": "python_runtime"}
    assert not ask(
        "execute", action="create", item_id="rows", parameters={**words, "files": {"main.py": rows}}
    ).is_error
    ran = ask("execute", item_id="rows").content
    handle = ran.get("result_handle")
    assert handle, ran

    page = ask("load", item_type="output", item_id=handle, grep="ROW 3999|end 7").content
    few = ask("load", item_type="output", item_id=handle, grep="row", length=100).content

    assert as_text(page["content"]).splitlines()[0] == "23: [7].text: end 7"
    assert as_text(page["content"]).splitlines()[-1] == "11998: [3999].text: row 3999"
    assert summarize(page).endswith(f"({page['matches']} lines match)")
    more = ask("load", item_type="output", item_id=handle, grep="row", offset=few["next_offset"], length=100).content
    assert as_text(more["content"]).startswith(f"{few['next_offset']}: ")
    assert ask("load", item_id="rows", grep="x").content["code"] == "invalid_request"


def test_no_answer_has_empty_text(ask: Ask) -> None:
    for verb, action in (("secrets", "list"), ("key", "list"), ("prefer", "list"), ("approvals", "list")):
        assert len(summarize(ask(verb, action=action).content)) > len(": ")
    assert summarize({"result": "", "action": "run"}) == "(empty)"
