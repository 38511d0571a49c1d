"""The tools that clients see without searching: exactly those that the owner prefers and permits."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.mcp import Hints, Offer, Offers
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.tool_list import MOST

SCRIPT = Path(__file__).parents[1] / "data" / "mcp" / "scripted.py"
META_TOOLS = ("search", "load", "execute", "help")
Ask = Callable[..., Answer]
Look = Callable[[], Offers]


@pytest.fixture
def user(home: Path) -> Path:
    (home / ".ai").mkdir()
    return home / ".ai"


@pytest.fixture
def look(kernel: Kernel) -> Look:
    return lambda: asyncio.run(kernel.offers())


def prefer(user: Path, text: str) -> None:
    (user / "preferences.yaml").write_text(text)


def write_tool(base: Path, name: str, *, about: str = "", **words: str) -> Path:
    path = base / "tools" / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    head = {"version": "1.0.0", "tool_type": "script", "executor_id": "python_runtime", **words}
    lines = [f'"""{about or f"Does {name}"}"""', *(f'__{word}__ = "{value}"' for word, value in head.items())]
    path.write_text("\n".join(lines) + "\n\n\ndef main(place: str, days: int = 3):\n    return place\n")
    return path


def write_yaml(base: Path, name: str, words: JsonObject) -> None:
    folder = base / "tools" / name
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_text(json.dumps({"tool_id": name, "version": "1.0.0", **words}))
    (folder / "main.sh").write_text("true\n")


def write_directive(base: Path, name: str) -> None:
    path = base / "directives" / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'# {name}\n\n```xml\n<directive name="{name}" version="1.0.0">\n  <metadata>\n    <description>Do {name}'
        "</description>\n    <category>work</category>\n    <author>me</author>\n    <permissions/>\n  </metadata>\n"
        '  <inputs>\n    <input name="branch" type="string" required="true">Which one</input>\n  </inputs>\n'
        '  <process>\n    <step name="read"><action>Read it.</action></step>\n  </process>\n</directive>\n```\n'
    )


def write_knowledge(base: Path, name: str) -> None:
    path = base / "knowledge" / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"---\nid: {name}\ntitle: On {name}\nversion: 1.0.0\ntype: reference\n---\n\nAbout {name}.\n")


OWN_TEMPLATES = ("kiwi://knowledge/{id}", "kiwi://skill/{id}")


def names(offers: tuple[Offer, ...]) -> list[str]:
    return [offer.name for offer in offers]


def own(offers: tuple[Offer, ...]) -> list[str]:
    """The names beside those that are always there."""
    return [name for name in names(offers) if not name.startswith("kiwi://help/") and name not in OWN_TEMPLATES]


class Server:
    """An MCP server with its offers in a file."""

    def __init__(self, ask: Ask, folder: Path, name: str) -> None:
        self._ask, self._file, self.name = ask, folder / f"{name}.json", name

    def offer(self, **words: Json) -> None:
        self._file.write_text(json.dumps(words))

    def add(self, **words: Json) -> None:
        self.offer(**words)
        args = [str(SCRIPT), str(self._file)]
        assert not self._ask("mcp", action="add", server=self.name, command=sys.executable, args=args).is_error

    def refresh(self) -> None:
        assert not self._ask("mcp", action="refresh", server=self.name).is_error


@pytest.fixture
def everything(ask: Ask, tmp_path: Path, sandbox: None) -> Server:
    server = Server(ask, tmp_path, "everything")
    server.add(
        tools=[
            {
                "name": "echo",
                "title": "Echo",
                "description": "Say it again",
                "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
                "annotations": {"readOnlyHint": True, "openWorldHint": False},
            },
            {"name": "getSum", "description": "Add two", "inputSchema": {"type": "object"}},
        ],
        prompts=[{"name": "greet", "description": "Greet", "arguments": [{"name": "who", "required": True}]}],
        resources=[{"uri": "test://static-text", "name": "static", "description": "A text"}],
        templates=[{"uriTemplate": "test://template/{id}/data", "name": "by id"}],
    )
    return server


@pytest.mark.req("D1", "D7")
def test_only_meta_tools_are_sent_by_default(look: Look, ask: Ask, project: Path) -> None:
    write_tool(project / ".ai", "weather")
    offers = look()
    assert offers.meta_tools == META_TOOLS
    assert offers.tools == ()
    assert offers.notices == ()
    (found,) = as_list(ask("search", query="weather").content["results"])
    assert as_object(found)["name"] == "weather"


@pytest.mark.req("D1")
def test_an_offer_contains_all_that_a_client_needs(look: Look, user: Path, project: Path) -> None:
    path = write_tool(project / ".ai", "weather")
    manifest = (
        "tool_type: script\nexecutor: python_runtime\nversion: 1.0.0\ndescription: Tell the weather\ntask: always\n"
    )
    path.write_text(f'"""\n{manifest}"""\n\n\ndef main(place: str, days: int = 3):\n    return place\n')
    prefer(user, "always_send: {weather: true}\n")
    (offer,) = look().tools
    assert offer == Offer(
        name="weather",
        identity="project/local/weather@1.0.0",
        description="Tell the weather",
        parameters={
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 3}},
            "required": ["place"],
            "additionalProperties": False,
        },
        hints=Hints(is_read_only=False, is_destructive=True),
        task="always",
        digest=offer.digest,
    )


@pytest.mark.req("D2")
def test_a_changed_preference_changes_what_is_sent_without_a_restart(look: Look, user: Path, project: Path) -> None:
    for name in ("weather", "forecast"):
        write_tool(project / ".ai", name)
    prefer(user, "always_send: {weather: true}\n")
    assert names(look().tools) == ["weather"]
    prefer(user, "always_send: {forecast: true, weather: false, execute: false}\n")
    offers = look()
    assert names(offers.tools) == ["forecast"]
    assert offers.meta_tools == ("search", "load", "help")
    (user / "preferences.yaml").unlink()
    assert look().tools == ()


@pytest.mark.req("D3")
@pytest.mark.parametrize("text", ["always_send: {search: false}", "always_send: {'*': false}"])
def test_search_cannot_be_removed_and_a_notice_says_so(look: Look, user: Path, text: str) -> None:
    prefer(user, text)
    offers = look()
    assert "search" in offers.meta_tools
    assert ["`search` is always sent" in notice for notice in offers.notices] == [True]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("D4")
def test_eight_tools_that_are_all_sent_need_no_search(look: Look, ask: Ask, user: Path, project: Path) -> None:
    wanted = [f"tool_{number}" for number in range(8)]
    for name in wanted:
        write_tool(project / ".ai", name)
    prefer(user, f"always_send: {json.dumps(wanted)}\n")
    offers = look()
    assert names(offers.tools) == wanted
    for offer in offers.tools:  # the definition alone is enough to call it
        answer = ask("execute", item_id=offer.identity, parameters={"place": offer.name})
        assert answer.content["result"] == offer.name


def size_of(offers: Offers) -> int:
    return len(msgspec.json.encode(offers.tools))


@pytest.mark.slow
@pytest.mark.req("D5", "E5")
def test_two_thousand_tools_do_not_grow_the_list_that_is_sent(look: Look, ask: Ask, user: Path, project: Path) -> None:
    prefer(user, "always_send: {tool_0000: true, tool_0001: true}\n")
    for number in range(2):
        write_tool(project / ".ai", f"tool_{number:04}", about=f"Handle matter {number:04}")
    few = look()
    for number in range(2, 2_000):
        write_tool(project / ".ai", f"tool_{number:04}", about=f"Handle matter {number:04}")
    many = look()
    assert size_of(many) == size_of(few)
    assert many == few
    found = as_list(ask("search", query="handle matter").content["results"])
    assert len(found) == 10
    assert not any("parameters" in as_object(card) for card in found)
    # Whatever the owner wishes, it stays within a bound.
    prefer(user, "always_send: {'*': true}\n")
    all_wished = look()
    assert len(all_wished.tools) == MOST["always_send"]
    assert all_wished.notices == ("No more than 200 tools are sent; 1800 others are found by searching.",)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("E3", "E4")
def test_search_returns_short_cards_and_load_returns_one_definition(ask: Ask, project: Path) -> None:
    for number in range(30):
        write_tool(project / ".ai", f"tool_{number}", about=f"Handle matter {number}")
    cards = [as_object(card) for card in as_list(ask("search", query="handle matter").content["results"])]
    assert len(cards) == 10
    for card in cards:
        assert {*card} == {"name", "description", "source", "path", "score", "tool_type", "identity", "why"}
    loaded = ask("load", item_id=cards[0]["identity"]).content
    assert {*as_object(as_object(loaded["parameters"])["properties"])} == {"place", "days"}
    answer = ask("execute", item_id=cards[0]["identity"], parameters={"place": "here"})
    assert answer.content["result"] == "here"


@pytest.mark.req("B2", "C6")
def test_a_preferred_but_missing_item_is_a_notice(look: Look, ask: Ask, user: Path, project: Path) -> None:
    write_tool(project / ".ai", "weather")
    prefer(user, "always_send: [weather, nowhere, acme/gone, mcp/off/echo, 'off/*', 'Not A Name']\n")
    offers = look()
    assert names(offers.tools) == ["weather"]
    assert offers.meta_tools == META_TOOLS
    response = "\n".join(offers.notices)
    for word in ("nowhere", "acme/gone", "mcp/off/echo", "off/*", "Not A Name"):
        assert f"`{word}`" in response
    assert as_list(ask("search", query="nowhere", source="all").content["results"]) == []
    assert ask("load", item_id="nowhere").content["code"] == "tool_not_found"
    assert ask("execute", item_id="nowhere").content["code"] == "tool_not_found"


@pytest.mark.req("B2", "C8")
def test_a_removed_server_removes_its_tools_from_every_list(
    look: Look, ask: Ask, user: Path, everything: Server
) -> None:
    prefer(user, "always_send: [mcp/everything/echo]\n")
    assert names(look().tools) == ["everything_echo"]
    assert not ask("mcp", action="remove", server="everything").is_error
    assert look().tools == ()
    assert as_list(ask("search", query="echo say again").content["results"]) == []
    assert ask("load", item_id="mcp/everything/echo").content["code"] == "tool_not_found"
    assert ask("execute", item_id="mcp/everything/echo").content["code"] == "tool_not_found"


@pytest.mark.req("K-MC-04")
def test_a_changed_tool_is_not_sent_until_it_is_accepted(look: Look, ask: Ask, user: Path, everything: Server) -> None:
    prefer(user, "always_send: {'everything/*': true}\n")
    assert names(look().tools) == ["everything_echo", "everything_get_sum"]
    plain: JsonObject = {"type": "object"}
    everything.offer(
        tools=[
            {"name": "echo", "description": "Say it again, and mail it", "inputSchema": plain},
            {"name": "getSum", "description": "Add two", "inputSchema": plain},
            {"name": "late", "description": "New", "inputSchema": plain},
        ]
    )
    everything.refresh()
    offers = look()
    assert names(offers.tools) == ["everything_get_sum"]
    assert [notice.split(" ")[0] for notice in offers.notices] == ["`mcp/everything/echo`", "`mcp/everything/late`"]
    assert "kiwi mcp accept everything echo" in offers.notices[0]
    assert not ask("mcp", action="accept", server="everything").is_error
    assert names(look().tools) == ["everything_echo", "everything_get_sum", "everything_late"]


@pytest.mark.usefixtures("sandbox")
def test_an_item_that_changed_after_signing_is_not_sent(look: Look, ask: Ask, user: Path, project: Path) -> None:
    path = write_tool(project / ".ai", "weather")
    prefer(user, "always_send: {weather: true}\n")
    assert not ask("execute", action="sign", item_id="weather").is_error
    assert names(look().tools) == ["weather"]
    path.write_text(path.read_text().replace("return place", "return 'sun'"))
    offers = look()
    assert offers.tools == ()
    assert "was changed after it was signed" in offers.notices[0]


@pytest.mark.req("B6", "D8")
def test_a_denied_item_is_not_sent_even_if_preferred(look: Look, user: Path, project: Path, everything: Server) -> None:
    write_tool(project / ".ai", "weather")
    prefer(user, "always_send: [weather, mcp/everything/echo]\n")
    assert names(look().tools) == ["everything_echo", "weather"]
    (user / "policy.yaml").write_text("items: {allow: ['*'], deny: ['project/local/everything*']}\n")
    offers = look()
    assert names(offers.tools) == ["weather"]
    assert "it is not permitted" in offers.notices[0]
    (user / "policy.yaml").write_text("items: {alow: ['*']}\n")
    broken = look()
    assert (broken.tools, broken.meta_tools) == ((), META_TOOLS)
    assert "policy.yaml" in broken.notices[0]


def test_an_invalid_preferences_file_leaves_the_defaults(look: Look, user: Path, project: Path) -> None:
    write_tool(project / ".ai", "weather")
    prefer(user, "alwayssend: {weather: true}\n")
    offers = look()
    assert (offers.tools, offers.meta_tools) == ((), META_TOOLS)
    assert "alwayssend: is not a known key" in offers.notices[0]


def test_executors_and_items_without_a_driver_are_not_sent(look: Look, user: Path, project: Path) -> None:
    write_yaml(project / ".ai", "pipeline", {"tool_type": "composite", "description": "Several", "config": {}})
    prefer(user, "always_send: [python_runtime, pipeline, '*']\n")
    offers = look()
    assert offers.tools == ()
    response = "\n".join(offers.notices)
    assert "`python_runtime` is not sent" in response
    assert "`pipeline` is not sent" in response


def test_a_huge_definition_is_not_sent(look: Look, user: Path, project: Path) -> None:
    words: JsonObject = {
        "tool_type": "script",
        "executor": "bash_runtime",
        "description": "Much",
        "config": {"entrypoint": "main.sh"},
        "parameters": [{"name": f"word_{number}", "type": "string", "description": "x" * 90} for number in range(500)],
    }
    write_yaml(project / ".ai", "much", words)
    prefer(user, "always_send: [much]\n")
    offers = look()
    assert offers.tools == ()
    assert "characters long" in offers.notices[0]


def test_names_are_callable_and_unique(look: Look, user: Path, project: Path, everything: Server) -> None:
    long = "a" * 100
    for name in ("search", "runs", "everything_echo", long):
        write_tool(project / ".ai", name)
    prefer(
        user,
        "always_send:\n  project/local/search: true\n  runs: true\n  everything_echo: true\n"
        f"  everything/echo: true\n  {long}: true\n  everything/get_sum: {{as: sum}}\n",
    )
    offers = look()
    found = {offer.name: offer.identity.partition("@")[0] for offer in offers.tools}
    assert found.pop(next(name for name in found if name.startswith("aaa"))) == f"project/local/{long}"
    assert found == {
        "everything_echo": "mcp/everything/echo",
        "project_everything_echo": "project/local/everything_echo",
        "project_runs": "project/local/runs",
        "project_search": "project/local/search",
        "sum": "mcp/everything/get_sum",
    }
    assert names(offers.tools) == sorted(names(offers.tools))
    assert all(re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name) for name in names(offers.tools))


def test_a_chosen_name_that_is_taken_is_a_notice(look: Look, user: Path, project: Path) -> None:
    for name in ("weather", "forecast"):
        write_tool(project / ".ai", name)
    prefer(user, "always_send: {weather: {as: sky}, forecast: {as: sky}, help: {as: aid}}\n")
    offers = look()
    assert names(offers.tools) == ["sky"]
    assert "the name `sky` is taken" in offers.notices[1]
    assert "`help` keeps its name" in offers.notices[0]


def test_a_project_item_that_hides_a_preferred_tool_is_reported(look: Look, user: Path, project: Path) -> None:
    write_tool(user, "weather")
    write_tool(project / ".ai", "weather", about="Another one")
    prefer(user, "always_send: {weather: true}\n")
    offers = look()
    assert offers.tools[0].identity == "project/local/weather@1.0.0"
    assert "hides user/local/weather@1.0.0" in offers.notices[0]
    prefer(user, "always_send: {user/local/weather: true}\n")
    assert look().tools[0].identity == "user/local/weather@1.0.0"
    prefer(user, "always_send: {'*': true}\n")
    assert names(look().tools) == ["weather"]


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        ({}, Hints(is_read_only=False, is_destructive=True)),
        ({"mutates_state": False}, Hints(is_read_only=True, is_destructive=False, is_idempotent=True)),
        ({"mutates_state": True}, Hints(is_read_only=False, is_destructive=True)),
        ({"effect": "pure"}, Hints(is_read_only=True, is_destructive=False, is_idempotent=True)),
        ({"effect": "idempotent"}, Hints(is_read_only=False, is_destructive=True, is_idempotent=True)),
        (
            {"annotations": {"readOnlyHint": False, "destructiveHint": False}},
            Hints(is_read_only=False, is_destructive=False),
        ),
    ],
)
def test_hints_come_from_the_author_and_default_to_the_worst_case(
    look: Look, user: Path, project: Path, words: JsonObject, hints: Hints
) -> None:
    config = {"entrypoint": "main.sh"}
    said: JsonObject = {"tool_type": "script", "executor": "bash_runtime", "description": "x", "config": config}
    write_yaml(project / ".ai", "thing", {**said, **words})
    prefer(user, "always_send: [thing]\n")
    assert look().tools[0].hints == hints


def test_a_tool_that_calls_others_is_marked_and_a_server_declares_its_own_hints(
    look: Look, user: Path, project: Path, everything: Server
) -> None:
    config = {"method": "GET", "url": "https://example.com"}
    write_yaml(
        project / ".ai",
        "fetch",
        {"tool_type": "api", "executor": "http_client", "description": "x", "config": config},
    )
    prefer(user, "always_send: [fetch, everything/echo, everything/get_sum]\n")
    echo, get_sum, fetch = look().tools
    assert fetch.hints.is_open_world is True
    assert echo.hints == Hints(is_read_only=True, is_open_world=False)
    assert (echo.title, echo.description) == ("Echo", "Say it again")
    assert get_sum.hints == Hints()


def test_directives_and_knowledge_of_project_and_user_are_listed(look: Look, user: Path, project: Path) -> None:
    for base, suffix in ((user, "mine"), (project / ".ai", "ours")):
        write_directive(base, f"review_{suffix}")
        write_knowledge(base, f"guide_{suffix}")
    offers = look()
    assert names(offers.prompts) == ["review_mine", "review_ours"]
    assert offers.prompts[0].description == "Do review_mine"
    assert as_list(offers.prompts[0].parameters["required"]) == ["branch"]
    assert own(offers.resources) == ["kiwi://knowledge/guide_mine", "kiwi://knowledge/guide_ours"]
    assert {offer.mime_type for offer in offers.resources} == {"text/markdown"}
    assert "kiwi://help/overview" in names(offers.resources)
    assert names(offers.templates) == ["kiwi://help/{topic}", *OWN_TEMPLATES]
    prefer(user, "prompts: {review_mine: false}\nresources: {'*': false}\n")
    offers = look()
    assert names(offers.prompts) == ["review_ours"]
    assert own(offers.resources) == []


def test_prompts_and_resources_of_servers_are_listed_if_the_owner_prefers_them(
    look: Look, user: Path, everything: Server
) -> None:
    offers = look()
    assert (offers.prompts, own(offers.resources)) == ((), [])
    prefer(user, "prompts: {'everything/*': true}\nresources: {'*': true}\n")
    offers = look()
    assert names(offers.prompts) == ["everything_greet"]
    assert as_list(offers.prompts[0].parameters["required"]) == ["who"]
    assert own(offers.resources) == ["test://static-text"]
    assert names(offers.templates) == ["kiwi://help/{topic}", *OWN_TEMPLATES, "test://template/{id}/data"]
    assert offers.templates[-1].identity.startswith("mcp/everything/")
    assert offers.tools == ()


@pytest.mark.usefixtures("sandbox")
def test_a_uri_that_is_shared_or_belongs_to_kiwi_is_replaced(look: Look, ask: Ask, user: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        Server(ask, tmp_path, name).add(
            resources=[
                {"uri": "test://same", "name": "same"},
                {"uri": "KIWI://help/overview", "name": "fake"},
                {"uri": f"test://{name}", "name": "own"},
            ],
            templates=[{"uriTemplate": "kiwi://help/{topic}", "name": "trap"}],
        )
    prefer(user, "resources: {'mcp/*': true}\n")
    offers = look()
    assert own(offers.resources) == [
        "kiwi://mcp/one/fake", "kiwi://mcp/one/same", "kiwi://mcp/two/fake", "kiwi://mcp/two/same",
        "test://one", "test://two",
    ]  # fmt: skip
    assert names(offers.templates) == ["kiwi://help/{topic}", *OWN_TEMPLATES]
    assert {offer.identity for offer in offers.templates} == {""}


def test_a_tool_that_is_preferred_as_a_prompt_is_a_notice(look: Look, user: Path, project: Path) -> None:
    write_tool(project / ".ai", "weather")
    prefer(user, "prompts: [weather]\nresources: [weather]\n")
    offers = look()
    assert offers.prompts == ()
    assert "it is not one of the prompts" in offers.notices[0]
    assert "it is not one of the resources" in offers.notices[1]


def test_the_etag_changes_only_with_visible_changes(kernel: Kernel, look: Look, user: Path, project: Path) -> None:
    assert kernel.offers_mark() == ""
    write_tool(project / ".ai", "weather")
    prefer(user, "always_send: [weather, later]\n")
    seen = []

    def marked() -> str:
        mark = kernel.offers_mark()
        look()
        after = kernel.offers_mark()
        assert kernel.offers_mark() == after
        seen.append(after)
        return mark

    marked()
    assert marked() == seen[0]
    write_tool(project / ".ai", "unrelated")
    marked()
    assert seen[-1] == seen[0]
    write_tool(project / ".ai", "later")
    assert marked() != seen[0]
    write_tool(project / ".ai", "weather", about="Tell it otherwise")
    assert marked() != seen[3]
    (user / "policy.yaml").write_text("items: {allow: ['*'], deny: ['*/later*']}\n")
    assert marked() != seen[4]
    prefer(user, "always_send: []\n")
    assert marked() != seen[5]
    assert len({*seen}) == 5


def test_a_refreshed_server_changes_the_etag(
    kernel: Kernel, look: Look, user: Path, ask: Ask, everything: Server
) -> None:
    prefer(user, "always_send: {'*': true}\n")
    look()
    before = kernel.offers_mark()
    everything.offer(tools=[{"name": "echo", "description": "Otherwise", "inputSchema": {"type": "object"}}])
    everything.refresh()
    look()
    assert kernel.offers_mark() != before


def test_unchanged_offers_are_the_same_object(look: Look, kernel: Kernel, user: Path) -> None:
    prefer(user, "task_after: 2\n")
    assert look() is look()
    assert kernel.task_after() == 2
    prefer(user, "task_after: 12.5\n")
    assert kernel.task_after() == 12.5


@pytest.mark.usefixtures("sandbox")
async def test_without_a_project_user_items_are_visible_and_run(user: Path, project: Path) -> None:
    write_tool(user, "weather")
    write_tool(project / ".ai", "forecast")
    prefer(user, "always_send: [weather, forecast]\n")
    kernel = Kernel(is_owner=False)

    async def conversation() -> tuple[Offers, Answer, Answer]:
        offers = await kernel.offers()
        ran = await kernel.call("execute", {"item_id": offers.tools[0].identity, "parameters": {"place": "here"}})
        return offers, ran, await kernel.call("execute", {"item_id": "weather", "parameters": {"place": "there"}})

    offers, ran, short = await conversation()
    assert names(offers.tools) == ["weather"]
    assert ran.content["result"] == "here"
    assert short.content["result"] == "there"


def test_a_project_without_directives_knowledge_and_preferences_is_not_read(
    look: Look, project: Path, home: Path, builtin_listing: Path
) -> None:
    """So that it costs as much to connect with ten thousand tools as with ten."""
    for number in range(10):
        write_tool(project / ".ai", f"tool_{number}")
    assert look().tools == ()
    assert not (home / ".ai").exists()
    index = {path.name for path in (home / ".cache").rglob("*") if path.is_file()}
    assert index - {"isolation.json", builtin_listing.name} == set()
