"""Preferred tools, prompts, resources and completions, used by the official client of both eras."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mcp_types as types
import pytest
from mcp import Client
from mcp.client.subscriptions import Subscription
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ResourceUpdated, ToolsListChanged

from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.server import McpServer, build_server
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

UPSTREAM = Path(__file__).with_name("upstream.py")
PIXEL = "iVBORw0KGgo="
META = ["search", "load", "execute", "help"]
PATIENCE = 120.0
Mode = Literal["auto", "legacy"]
Ref = types.PromptReference | types.ResourceTemplateReference
pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
both_eras = pytest.mark.parametrize("mode", ["auto", "legacy"])

DIRECTIVE = """# Release
```xml
<directive name="release" version="1.0.0">
  <metadata><description>Release a version</description><category>ops</category><author>me</author></metadata>
  <inputs>
    <input name="target" type="string" required="true">Where to</input>
    <input name="count" type="integer">How many</input>
  </inputs>
  <process>
    <step name="build"><description>Build it</description><action>Run make for {target}</action></step>
    <step name="ship"><description>Ship it</description><action>Push</action></step>
  </process>
  <success_criteria><criterion>It is up</criterion></success_criteria>
</directive>
```
"""


@dataclass
class House:
    """A project and a user's space with a kernel for them, and a server that clients talk to in memory."""

    project: Path
    user: Path
    has_project: bool = True

    def prefer(self, text: str) -> None:
        self.user.mkdir(exist_ok=True)
        (self.user / "preferences.yaml").write_text(text, encoding="utf-8")

    def write(self, path: str, text: str) -> None:
        file = (self.project / ".ai" if self.has_project else self.user) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def tool(self, name: str, script: str, **words: Json) -> None:
        manifest = {"tool_id": name, "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0",
                    "description": f"A tool called {name}", "config": {"entrypoint": "main.sh"}, **words}  # fmt: skip
        self.write(f"tools/{name}/tool.yaml", json.dumps(manifest))
        self.write(f"tools/{name}/main.sh", script)

    async def add_upstream(self) -> None:
        kernel = Kernel(self.project)
        words: dict[str, Json] = {"server": "art", "command": sys.executable, "args": [str(UPSTREAM)]}
        added = await kernel.call("mcp", {"action": "add", **words})
        await kernel.aclose()
        assert not added.is_error, added

    async def add_boom(self) -> None:
        """Add a tool that leaves a mark in the project whenever it runs: its owner lets it run in no sandbox."""
        self.tool("boom", "touch boomed")
        kernel = Kernel(self.project)
        await kernel.call("execute", {"action": "sign", "item_id": "boom"})
        relaxed = await kernel.call("relax", {"action": "apply", "item_id": "boom", "to": "trusted"})
        await kernel.aclose()
        assert not relaxed.is_error, relaxed

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[McpServer]:
        kernel = Kernel(self.project if self.has_project else None, is_owner=False)
        calls = Calls(kernel.tasks, task_after=kernel.task_after, principal=lambda _: "tester")
        changes = ToolListWatcher(kernel, interval=0.1, soon=0.05)
        try:
            yield build_server(kernel, calls=calls, changes=changes)
        finally:
            await changes.aclose()
            await calls.aclose()
            await kernel.aclose()

    @asynccontextmanager
    async def client(self, mode: Mode, **options: Any) -> AsyncIterator[Client]:
        async with asyncio.timeout(PATIENCE), self.serving() as server, Client(server, mode=mode, **options) as client:
            yield client


@pytest.fixture
def house(project: Path, home: Path) -> House:
    return House(project, home / ".ai")


async def names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools(cache_mode="refresh")).tools]


def text_in(result: types.CallToolResult) -> str:
    assert isinstance(result.content[0], types.TextContent)
    return result.content[0].text


async def code_of(work: Awaitable[object]) -> tuple[int, Any]:
    with pytest.raises(MCPError) as refused:
        await work
    return refused.value.code, refused.value.data


@both_eras
async def test_the_list_is_the_meta_tools_and_the_always_send_tools_and_nothing_else(mode: Mode, house: House) -> None:
    house.tool("weather", "echo sunny", effect="pure")
    house.tool("hidden", "echo")
    house.tool("wipe", "echo gone")
    house.prefer("always_send: {weather: true, wipe: {as: clean}, nowhere: true}")

    async with house.client(mode) as client:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == [*META, "clean", "weather"]
        clean, weather = tools[-2].annotations, tools[-1].annotations
        assert clean is not None
        assert weather is not None
        assert (weather.read_only_hint, weather.destructive_hint) == (True, False)
        assert (clean.read_only_hint, clean.destructive_hint) == (False, True)
        assert tools[-1].description == "A tool called weather"


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_a_call_returns_the_result_of_the_tool_and_nothing_else(mode: Mode, house: House) -> None:
    house.tool("say", 'echo "$KIWI_PARAM_word"', parameters=[{"name": "word", "type": "string", "required": True}])
    house.tool("count", "echo '{\"n\": 3}'")
    house.tool("fail", "echo broken >&2; exit 3")
    house.prefer("always_send: [say, count, fail]")

    async with house.client(mode) as client:
        said = await client.call_tool("say", {"word": "žluť"})
        assert (said.is_error, text_in(said), said.structured_content) == (False, "žluť", None)
        counted = await client.call_tool("count", {})
        assert json.loads(text_in(counted)) == {"n": 3}
        failed = await client.call_tool("fail", {})
        assert failed.is_error
        assert "broken" in text_in(failed)
        assert {"error", "code", "item_type", "message", "suggestion"} <= failed.structured_content.keys()
        refused = await client.call_tool("say", {"words": "x"})
        assert refused.is_error
        assert refused.structured_content["code"] == "invalid_input"


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_a_declared_result_is_structured_and_a_different_one_is_an_error(mode: Mode, house: House) -> None:
    outputs: Json = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    house.tool("right", "echo '{\"n\": 3}'", outputs=outputs)
    house.tool("wrong", "echo '{\"m\": 3}'", outputs=outputs)
    house.tool(
        "large", "printf '{\"n\": 1, \"text\": \"'; head -c 100000 /dev/zero | tr '\\0' x; echo '\"}'", outputs=outputs
    )
    house.prefer("always_send: [right, wrong, large]")

    async with house.client(mode) as client:
        assert (await client.list_tools()).tools[-1].output_schema
        right = await client.call_tool("right", {})
        assert right.structured_content == {"n": 3}
        assert json.loads(text_in(right)) == {"n": 3}
        wrong = await client.call_tool("wrong", {})
        assert wrong.is_error
        assert "outputs" in text_in(wrong)
        large = await client.call_tool("large", {})
        assert len(large.structured_content["text"]) == 100_000


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_an_unknown_name_is_an_invalid_parameter(mode: Mode, house: House) -> None:
    async with house.client(mode) as client:
        code, data = await code_of(client.call_tool("no_such_tool", {}))
        assert (code, data["code"]) == (types.INVALID_PARAMS, "tool_not_found")
        unlisted = await client.call_tool("doctor", {})
        assert "code" not in unlisted.structured_content


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_the_answer_of_an_mcp_server_is_passed_on_unchanged(mode: Mode, house: House) -> None:
    await house.add_upstream()
    house.prefer("always_send: {art/draw: {as: draw}, art/measure: true, art/fail: true}")

    async with house.client(mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert listed.keys() == {*META, "draw", "art_measure", "art_fail"}
        assert listed["draw"].annotations == types.ToolAnnotations(read_only_hint=True)
        drawn = await client.call_tool("draw", {})
        assert [block.type for block in drawn.content] == ["text", "image", "audio", "resource_link", "resource"]
        assert drawn.content[1] == types.ImageContent(data=PIXEL, mime_type="image/png")
        assert drawn.content[0].meta == {"mine": 1}
        assert drawn.meta is not None
        assert drawn.meta["yours"] == 2
        measured = await client.call_tool("art_measure", {})
        assert measured.structured_content == {"width": 1}
        failed = await client.call_tool("art_fail", {})
        assert failed.is_error
        assert [block.type for block in failed.content] == ["text", "image"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("D2")
@both_eras
async def test_a_changed_preference_is_announced_and_the_next_list_differs(mode: Mode, house: House) -> None:
    house.tool("weather", "echo sunny")
    heard = asyncio.Event()

    async def hear(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            heard.set()

    async with house.client(mode, message_handler=hear) as client:
        assert await names(client) == META
        if mode == "legacy":
            house.prefer("always_send: [weather]")
            await heard.wait()
        else:
            async with client.listen(tools_list_changed=True) as news:
                house.prefer("always_send: [weather]")
                assert await anext(news) == ToolsListChanged()
        assert await names(client) == [*META, "weather"]
        assert text_in(await client.call_tool("weather", {})) == "sunny"


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_user_items_need_no_project(mode: Mode, house: House) -> None:
    house.has_project = False
    house.tool("weather", "echo sunny")
    house.tool("much", "head -c 100000 /dev/zero | tr '\\0' x")
    house.write("knowledge/long.md", f"---\nid: long\ntitle: Long\nversion: 1.0.0\n---\n{'word ' * 40_000}\n")
    house.write("directives/release.md", DIRECTIVE)
    house.prefer("always_send: [weather, much]")

    async with house.client(mode) as client:
        assert await names(client) == [*META, "much", "weather"]
        assert text_in(await client.call_tool("weather", {})) == "sunny"
        assert (await client.get_prompt("release", {"target": "x"})).messages
        (long,) = (await client.read_resource("kiwi://knowledge/long")).contents
        assert isinstance(long, types.TextResourceContents)
        assert len(long.text) == 199_999
        preview = (await client.call_tool("much", {})).content[-1]
        assert isinstance(preview, types.TextContent)
        handle = preview.text.partition("item_id ")[2].split()[0]
        for where in ({}, {"project_path": str(house.project)}):
            page = await client.call_tool("load", {"item_type": "output", "item_id": handle, **where})
            assert page.structured_content["total_characters"] == 100_000


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_an_error_of_a_server_keeps_its_code(mode: Mode, house: House) -> None:
    await house.add_upstream()
    house.prefer("{always_send: {art/refuse: true}, resources: {art/*: true}}")

    async with house.client(mode) as client:
        assert (await code_of(client.call_tool("art_refuse", {})))[0] == -32601
        via_execute = await client.call_tool("execute", {"item_id": "mcp/art/refuse"})
        assert via_execute.is_error
        gone = types.INVALID_PARAMS if mode == "auto" else -32002
        assert await code_of(client.read_resource("test://row/0/end")) == (gone, {"uri": "test://row/0/end"})


@both_eras
async def test_a_directive_is_a_prompt_with_a_program_for_a_model(mode: Mode, house: House) -> None:
    house.write("directives/release.md", DIRECTIVE)

    async with house.client(mode) as client:
        (prompt,) = (await client.list_prompts()).prompts
        assert (prompt.name, prompt.description) == ("release", "Release a version")
        assert [(one.name, one.required) for one in prompt.arguments or ()] == [("target", True), ("count", False)]
        got = await client.get_prompt("release", {"target": "prod", "count": "3"})
        (message,) = got.messages
        assert message.role == "user"
        assert isinstance(message.content, types.TextContent)
        for words in ("# release", "- target: prod", "- count: 3", "1. build: Build it", "2. ship", "- It is up"):
            assert words in message.content.text
        code, data = await code_of(client.get_prompt("release", {}))
        assert (code, data["code"]) == (types.INVALID_PARAMS, "invalid_input")


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_an_unlisted_directive_is_available_as_a_prompt_and_a_tool_is_not(mode: Mode, house: House) -> None:
    house.write("directives/release.md", DIRECTIVE)
    await house.add_boom()
    house.prefer("prompts: {'project/local/*': false}")

    async with house.client(mode) as client:
        assert (await client.list_prompts()).prompts == []
        assert (await client.get_prompt("release", {"target": "x"})).messages
        assert (await code_of(client.get_prompt("boom")))[0] == types.INVALID_PARAMS
        assert (await code_of(client.get_prompt("nothing")))[0] == types.INVALID_PARAMS
    assert not (house.project / "boomed").exists()


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_a_server_prompt_keeps_its_messages(mode: Mode, house: House) -> None:
    await house.add_upstream()
    house.prefer("prompts: {art/look: {as: look}}")

    async with house.client(mode) as client:
        assert [prompt.name for prompt in (await client.list_prompts()).prompts] == ["look"]
        got = await client.get_prompt("look", {"at": "it"})
        assert [message.role for message in got.messages] == ["assistant", "user"]
        assert got.messages[0].content == types.TextContent(text="Look at it")
        assert got.messages[1].content == types.ImageContent(data=PIXEL, mime_type="image/png")


@both_eras
async def test_help_and_knowledge_are_readable_resources(mode: Mode, house: House) -> None:
    house.write("knowledge/api_notes.md", "---\nid: api_notes\ntitle: Notes\nversion: 1.0.0\n---\n# Notes\n\nhello\n")
    house.write("knowledge/long.md", f"---\nid: long\ntitle: Long\nversion: 1.0.0\n---\n{'word ' * 40_000}\n")

    async def text_at(client: Client, uri: str) -> str:
        (found,) = (await client.read_resource(uri)).contents
        assert isinstance(found, types.TextResourceContents)
        assert (found.uri, found.mime_type) == (uri, "text/markdown")
        return found.text

    async with house.client(mode) as client:
        listed = {resource.uri for resource in (await client.list_resources()).resources}
        assert {"kiwi://help/overview", "kiwi://knowledge/api_notes"} <= listed
        templates = {one.uri_template for one in (await client.list_resource_templates()).resource_templates}
        assert templates == {"kiwi://help/{topic}", "kiwi://knowledge/{id}", "kiwi://skill/{id}"}
        assert "`search`" in await text_at(client, "kiwi://help/overview")
        assert await text_at(client, "kiwi://knowledge/api_notes") == "# Notes\n\nhello"
        assert len(await text_at(client, "kiwi://knowledge/long")) == 199_999


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_an_unknown_uri_is_reported_with_the_uri_and_runs_nothing(mode: Mode, house: House) -> None:
    await house.add_boom()
    expected = types.INVALID_PARAMS if mode == "auto" else -32002

    async with house.client(mode) as client:
        for uri in ("test://nothing", "kiwi://knowledge/boom", "kiwi://knowledge/none", "kiwi://help/none", "kiwi://x"):
            assert await code_of(client.read_resource(uri)) == (expected, {"uri": uri})
    assert not (house.project / "boomed").exists()


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_server_resources_are_read_by_uri_and_by_template(mode: Mode, house: House) -> None:
    await house.add_upstream()
    house.prefer("resources: {art/*: true}")

    async with house.client(mode) as client:
        assert "test://pixel" in {resource.uri for resource in (await client.list_resources()).resources}
        (pixel,) = (await client.read_resource("test://pixel")).contents
        assert pixel == types.BlobResourceContents(uri="test://pixel", mime_type="image/png", blob=PIXEL)
        (row,) = (await client.read_resource("test://row/7/end")).contents
        assert isinstance(row, types.TextResourceContents)
        assert row.text == "test://row/7/end"


@both_eras
async def test_a_changed_watched_text_is_announced(mode: Mode, house: House) -> None:
    uri = "kiwi://knowledge/notes"
    notes = "---\nid: notes\ntitle: Notes\nversion: 1.0.0\n---\n{}\n"
    house.write("knowledge/notes.md", notes.format("old"))
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def hear(message: object) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            heard.put_nowait(message.params.uri)

    async def listened(news: Subscription) -> None:
        house.write("knowledge/notes.md", notes.format("newer"))
        assert await anext(news) == ResourceUpdated(uri)

    async with house.client(mode, message_handler=hear) as client:
        if mode == "auto":
            async with client.listen(resource_subscriptions=[uri]) as news:
                await listened(news)
            return
        await client.subscribe_resource(uri)
        house.write("knowledge/notes.md", notes.format("newer"))
        assert await heard.get() == uri
        await client.unsubscribe_resource(uri)


@pytest.mark.usefixtures("sandbox")
@both_eras
async def test_arguments_are_completed_from_schemas_names_and_servers(mode: Mode, house: House) -> None:
    await house.add_upstream()
    house.prefer("{prompts: {art/look: true}, resources: {art/*: true, 'project/local/*': true}}")
    house.write(
        "directives/paint.md", DIRECTIVE.replace("release", "paint").replace('type="integer"', 'type="boolean"')
    )
    house.write("knowledge/api_notes.md", "---\nid: api_notes\ntitle: Notes\nversion: 1.0.0\n---\nhello\n")

    async def values(client: Client, ref: Ref, typed: str) -> list[str]:
        argument = {"name": "count" if isinstance(ref, types.PromptReference) else "id", "value": typed}
        return (await client.complete(ref, argument)).completion.values

    async with house.client(mode) as client:
        assert await values(client, types.PromptReference(name="paint"), "t") == ["true"]
        assert await values(client, types.PromptReference(name="nothing"), "t") == []
        at = types.ResourceTemplateReference
        assert await values(client, at(uri="kiwi://help/{topic}"), "ov") == ["overview"]
        assert await values(client, at(uri="kiwi://knowledge/{id}"), "api") == ["api_notes"]
        assert await values(client, at(uri="test://row/{number}/end"), "7") == ["7!", "ref/resource"]
        assert await values(client, types.PromptReference(name="art_look"), "x") == ["x!", "ref/prompt"]
        assert await values(client, at(uri="else://{x}"), "7") == []


async def test_a_handshake_client_sets_its_log_level(house: House) -> None:
    async with house.client("legacy") as client:
        assert await client.set_logging_level("warning") == types.EmptyResult()
