"""Tools that call tools: over a socket in their sandbox, only what their manifest names, as ordinary calls."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.drivers.tool_calls import serving_calls
from kiwi_mcp.kernel import Answer

pytestmark = [pytest.mark.usefixtures("sandbox", "loopback"), pytest.mark.req("K-CO-04")]
CALLS = {"items": ["price_of", "fails", "outer_2", "write_it", "secret_tool"]}
PYTHON = """
import os, sys
sys.path.append(os.environ["KIWI_CLIENT"])
from kiwi_client import ItemCallFailed, call

def main(item, times=1, parameters=None):
    found = []
    for _ in range(times):
        try:
            found.append(call(item, **(parameters or {})))
        except ItemCallFailed as error:
            found.append(error.code)
    return found[-1] if times == 1 else [len(found), found[-1]]
"""
NODE = """
const { call } = require(`${process.env.KIWI_CLIENT}/kiwi_client.js`)
console.log(JSON.stringify(call("price_of", { article: "jam" })))
"""


@pytest.fixture
async def tools(agents: Agents) -> Agents:
    """Give a tool that others call, and tools that call in three languages."""
    agents.bash_tool("price_of", """read -r x; echo "{\\"price\\": 3, \\"got\\": $x}" """, effect="pure")
    agents.bash_tool("fails", "exit 3")
    agents.bash_tool("secret_tool", "echo '{}'")
    agents.bash_tool("unnamed", "echo '{}'")
    agents.bash_tool("write_it", "echo x >> note.txt; echo '{}'", mutates_state=True, needs={"write": ["."]})
    agents.bash_tool(
        "by_bash", """kiwi call price_of '{"article": "tea"}'; kiwi call unnamed 2>&1 || true""", needs=CALLS
    )
    write(agents.user, "outer", PYTHON, CALLS)
    write(agents.user, "by_node", NODE, CALLS, "node_runtime")
    for number in range(1, 8):
        follow: Json = {"items": [f"outer_{number + 1}", f"outer_{number}"]}
        write(agents.user, f"outer_{number}", PYTHON, follow)
    names = [f"outer_{number}" for number in range(1, 8)]
    await agents.sign("price_of", "fails", "secret_tool", "unnamed", "write_it", "by_bash", "by_node", "outer", *names)
    return agents


def write(home: Path, name: str, code: str, needs: Json, runtime: str = "python_runtime") -> None:
    folder: Path = home / "tools" / name
    folder.mkdir(parents=True)
    manifest = {"tool_id": name, "tool_type": "script", "executor": runtime, "version": "1.0.0"}
    entrypoint = "main.js" if runtime == "node_runtime" else "main.py"
    own = {"description": f"Runs {name}", "config": {"entrypoint": entrypoint}, "needs": needs}
    properties = {"item": {"type": "string"}, "times": {"type": "integer"}, "parameters": {"type": "object"}}
    (folder / "tool.yaml").write_text(json.dumps({**manifest, **own, "parameters": {"properties": properties}}))
    (folder / entrypoint).write_text(code)


async def run(agents: Agents, tool: str, /, **parameters: Json) -> Answer:
    return await agents.call("execute", item_id=tool, parameters=parameters)


async def test_a_tool_calls_what_it_names_and_each_call_is_recorded_with_its_parent(tools: Agents) -> None:
    answer = await run(tools, "outer", item="price_of", parameters={"article": "tea"})
    assert answer.content["result"] == {"price": 3, "got": {"article": "tea"}}, answer.content
    receipts: list[dict[str, Any]] = (await tools.read("audit", action="export"))["receipts"]
    details = [json.loads(one["detail"] or "{}") for one in receipts]
    assert [one["tools"] for one in details if one.get("run") == answer.content["run_id"]] == [1]
    shell = await run(tools, "by_bash")
    first, second = str(shell.content["result"]).splitlines()
    assert json.loads(first)["got"] == {"article": "tea"}
    assert "not_permitted" in second
    node = await run(tools, "by_node")
    assert node.content["result"] == {"price": 3, "got": {"article": "jam"}}, node.content


@pytest.mark.parametrize(
    ("item", "code"),
    [("unnamed", "not_permitted"), ("outer", "not_permitted"), ("fails", "execution_failed"), ("write_it", "approval")],
)
async def test_a_call_that_may_not_be_made_or_fails_is_an_error_of_the_tool(
    tools: Agents, item: str, code: str
) -> None:
    answer = await run(tools, "outer", item=item)
    assert str(answer.content["result"]).startswith(code), answer.content
    assert not (tools.project / "note.txt").exists()


async def test_depth_and_number_of_calls_are_limited_and_a_tool_cannot_call_itself(tools: Agents) -> None:
    often = await run(tools, "outer", item="price_of", times=102)
    assert often.content["result"] == [102, "too_many"], often.content
    inner: dict[str, Json] = {"item": "outer_7"}
    for number in range(6, 1, -1):
        inner = {"item": f"outer_{number}", "parameters": inner}
    deep = await run(tools, "outer_1", **inner)
    assert deep.content["result"] == "too_deep", deep.content
    itself = await run(tools, "outer_1", item="outer_1", parameters={"item": "outer_1"})
    assert itself.content["result"] == "not_permitted"


async def test_the_rights_of_a_call_hold_for_the_calls_of_its_tool(tools: Agents) -> None:
    tools.directive("study", permissions='<execute resource="tool" id="outer"/>')
    await tools.sign("study")
    tools.model.will(use("execute", item_id="outer", parameters={"item": "secret_tool"}), say("Done."))
    done = await tools.start("study")
    (result,) = [one for one in await tools.events(done["thread_id"]) if one["kind"] == "result"]
    assert result["part"]["content"] == "not_permitted", result


async def test_an_unsigned_tool_gets_no_socket(tools: Agents) -> None:
    write(tools.project / ".ai", "new_one", PYTHON, CALLS)
    answer = await run(tools, "new_one", item="price_of")
    assert answer.content["code"] == "not_permitted", answer.content


async def test_the_socket_of_a_call_is_closed_when_the_call_has_ended(tools: Agents) -> None:
    async def dispatch(verb: str, request: JsonObject) -> Json:
        raise AssertionError((verb, request))

    catalog = tools.kernel.catalog()
    tool = catalog.find("outer")
    async with serving_calls(tool, ("price_of",), NO_CALLER, dispatch, catalog.space) as (descriptor, _):
        copied = os.dup(descriptor)
    with pytest.raises(BrokenPipeError):
        os.write(copied, b'{"item": "price_of"}\n')
    os.close(copied)
