"""The description of `search` names the current sources, within bounds."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.server.subscriptions import ToolsListChanged
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.grants import Grant, Rights, Rules
from kiwi_mcp.domain.json import JsonObject, as_text, compact
from kiwi_mcp.domain.mcp import Offers
from kiwi_mcp.domain.token_cost import cost_of
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.token_meter import all_sent
from kiwi_mcp.kernel.tool_names import known_namespaces, namespaces_place, touch_server_names, write_namespaces
from kiwi_mcp.store.database import silence
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.surfaces.gateway.auth import VisitedKernel
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.handlers import definitions
from kiwi_mcp.surfaces.mcp.handshake import HandshakeResult, LineBuffer, load_prepared, load_tools, path_of
from kiwi_mcp.surfaces.mcp.server import build_server, tool_lists
from kiwi_mcp.surfaces.mcp.stdio_server import settle
from kiwi_mcp.surfaces.mcp.tool_list import ONLY_META_TOOLS, ToolListWatcher, differences

SCRIPT = Path(__file__).parents[2] / "data" / "mcp" / "scripted.py"
MOST_TOKENS, MOST_CHARACTERS = 900, 3_600 + 300
Ask = Callable[..., Answer]


class Heard(ToolListWatcher):
    """The description that clients would get."""

    is_outdated = False

    def outdate_tools(self) -> None:
        self.is_outdated = True


def description_of(servers: Sequence[str], namespaces: Sequence[str]) -> str:
    return "\n".join(
        compact(tool.model_dump(mode="json", by_alias=True, exclude_none=True))
        for tool in definitions(servers, namespaces)
    )


def add(ask: Ask, tmp_path: Path, server: str, count: int) -> None:
    tools = [{"name": f"do_{number}", "inputSchema": {"type": "object"}} for number in range(count)]
    offers = tmp_path / f"{server}.json"
    offers.write_text(json.dumps({"tools": tools}))
    words = {"action": "add", "server": server, "command": sys.executable, "args": [str(SCRIPT), str(offers)]}
    assert not ask("mcp", **words).is_error


def settled(project: Path, opening: HandshakeResult | None = None) -> tuple[dict[str, str], bool]:
    """Let stage two keep its list, as at every start; return it, and whether a client hears that it has changed."""

    async def story() -> tuple[dict[str, str], bool]:
        kernel = Kernel(project, is_owner=False)
        changes, calls = Heard(kernel), Calls(kernel.tasks, task_after=lambda: 5.0, principal=lambda _: "")
        server = build_server(kernel, calls=calls, changes=changes)
        try:
            await settle(server, changes, opening or HandshakeResult(LineBuffer(), []), str(project))
            return await tool_lists(server), changes.is_outdated
        finally:
            await changes.aclose()
            await calls.aclose()
            await kernel.aclose()

    return asyncio.run(story())


async def search(machine: Machine, *queries: str, source: str = "all") -> None:
    """Search, each time until what that leaves to be done in the background is done."""
    try:
        for query in queries:
            assert not (await machine.kernel.call("search", {"query": query, "source": source})).is_error
            await machine.kernel.index(lambda _: None, seconds=20)
    finally:
        await machine.kernel.aclose()


@pytest.mark.usefixtures("sandbox")
def test_the_servers_with_most_tools_are_named_first(ask: Ask, tmp_path: Path, project: Path) -> None:
    assert "Installed here" not in settled(project)[0]["legacy"]
    add(ask, tmp_path, "small", 1)
    add(ask, tmp_path, "large", 3)

    lists, _ = settled(project)

    assert all("Installed here: large, small." in text for text in lists.values())
    ask("mcp", action="remove", server="large")
    assert "Installed here: small." in settled(project)[0]["legacy"]


NAMES = st.lists(st.text("abcxyz-_.123", min_size=1, max_size=80), max_size=60)


@given(NAMES, NAMES)
@settings(max_examples=25, deadline=None)
def test_all_definitions_stay_within_their_bounds_with_any_number_of_sources(
    servers: list[str], namespaces: list[str]
) -> None:
    text = description_of(servers, namespaces)
    assert cost_of(text).tokens < MOST_TOKENS
    assert len(text) <= MOST_CHARACTERS


def test_servers_without_space_are_counted() -> None:
    described = definitions([f"server-{number}" for number in range(500)])[0].description or ""
    named = described.count("server-")
    assert 5 < named < 40
    assert described.endswith(f" and {500 - named} more.")
    assert definitions(["x" * 500])[0].description == f"{definitions()[0].description} Installed here: {'x' * 40}."


def test_namespaces_leave_most_of_the_space_to_servers() -> None:
    namespaces = [f"team-{number}" for number in range(500)]
    alone = definitions([f"server-{number}" for number in range(500)])[0].description or ""
    both = definitions([f"server-{number}" for number in range(500)], namespaces)[0].description or ""
    assert both.count("server-") > alone.count("server-") / 2
    assert 1 < both.count("team-") < both.count("server-")
    assert definitions((), ["acme", "team"])[0].description == (
        f"{definitions()[0].description} In source registry: acme, team."
    )


def test_named_sources_count_in_the_cost_of_every_conversation() -> None:
    known = ("github", "tracker")
    plain, named = (
        {one.name: one.cost.tokens for one in all_sent(offers)}
        for offers in (ONLY_META_TOOLS, Offers(ONLY_META_TOOLS.meta_tools, servers=known, namespaces=known))
    )
    assert named["search"] > plain["search"]
    assert named["load"] == plain["load"]


def test_a_client_is_notified_when_a_server_appears_or_disappears() -> None:
    with_one = Offers(ONLY_META_TOOLS.meta_tools, servers=("github",))
    assert [*differences(ONLY_META_TOOLS, with_one)] == [ToolsListChanged()]
    assert [*differences(with_one, ONLY_META_TOOLS)] == [ToolsListChanged()]
    assert [*differences(with_one, with_one)] == []
    with_namespace = Offers(ONLY_META_TOOLS.meta_tools, namespaces=("acme",))
    assert [*differences(ONLY_META_TOOLS, with_namespace)] == [ToolsListChanged()]


@pytest.mark.usefixtures("sandbox")
def test_the_next_start_names_servers_at_once_and_drops_removed_ones(ask: Ask, tmp_path: Path, project: Path) -> None:
    prepared = load_prepared()
    settled(project)
    assert not Path(path_of(str(project))).exists()
    add(ask, tmp_path, "tracker", 1)
    assert load_tools(prepared, str(project)) == {}

    lists, is_outdated = settled(project, HandshakeResult(LineBuffer(), [], ("legacy", prepared["tools"]["legacy"])))

    assert is_outdated
    assert load_tools(prepared, str(project)) == lists != prepared["tools"]
    assert not settled(project, HandshakeResult(LineBuffer(), [], ("legacy", lists["legacy"])))[1]
    ask("mcp", action="remove", server="tracker")
    assert settled(project, HandshakeResult(LineBuffer(), [], ("legacy", lists["legacy"]))) == (prepared["tools"], True)
    assert load_tools(prepared, str(project)) == prepared["tools"]


@pytest.mark.usefixtures("sandbox")
def test_the_first_start_after_a_change_of_servers_sends_no_outdated_list(
    ask: Ask, tmp_path: Path, project: Path
) -> None:
    prepared = load_prepared()
    ask("mcp")
    assert load_tools(prepared, str(project)) == prepared["tools"]
    add(ask, tmp_path, "tracker", 1)
    for change in ({"action": "refresh", "server": "tracker"}, {"action": "accept", "server": "tracker"}):
        lists, _ = settled(project)
        assert load_tools(prepared, str(project)) == lists
        ask("mcp", action="list")
        assert load_tools(prepared, str(project)) == lists
        assert not ask("mcp", **change).is_error
        assert load_tools(prepared, str(project)) == {}
    settled(project)
    ask("mcp", action="remove", server="tracker")
    assert load_tools(prepared, str(project)) == {}
    assert settled(project)[0] == load_tools(prepared, str(project)) == prepared["tools"]


@pytest.mark.usefixtures("sandbox")
def test_a_server_removed_or_written_like_an_item_is_reflected_in_the_next_list(
    ask: Ask, tmp_path: Path, project: Path
) -> None:
    prepared = load_prepared()
    add(ask, tmp_path, "tracker", 1)
    assert "Installed here: tracker." in settled(project)[0]["legacy"]
    loaded = ask("load", item_id="tracker").content
    where = {"location": as_text(loaded["source"])}

    assert not ask("execute", action="delete", item_id="tracker", parameters=where).is_error
    assert load_tools(prepared, str(project)) == {}
    assert settled(project)[0] == prepared["tools"]

    written = {**where, "manifest": yaml.safe_load(as_text(loaded["content"]))}
    assert not ask("execute", action="create", item_id="tracker", parameters=written).is_error
    assert load_tools(prepared, str(project)) == {}

    settled(project)
    changed = {**where, "description": "Another one."}
    assert not ask("execute", action="update", item_id="tracker", parameters=changed).is_error
    assert load_tools(prepared, str(project)) == {}


@pytest.mark.usefixtures("sandbox")
def test_writing_another_item_does_not_change_the_list(ask: Ask, tmp_path: Path, project: Path) -> None:
    add(ask, tmp_path, "tracker", 1)
    lists, _ = settled(project)
    words = {"tool_id": "greet", "tool_type": "script", "version": "1.0.0", "executor": "bash_runtime"}
    manifest: JsonObject = {**words, "description": "Says hi.", "config": {"entrypoint": "main.sh"}}
    written = {"manifest": manifest, "files": {"main.sh": "echo hi\n"}}
    assert not ask("execute", action="create", item_id="greet", parameters=written).is_error
    assert load_tools(load_prepared(), str(project)) == lists


@pytest.mark.usefixtures("sandbox")
def test_namespaces_of_the_registry_are_named_from_the_first_list_after_a_change(
    a_machine: MakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = (a_machine(name, namespaces=["acme", "team"]) for name in ("ann", "bob"))
    monkeypatch.setenv("USER_SPACE", str(bob.user))
    project, prepared = str(bob.project), load_prepared()
    assert settled(bob.project)[0] == load_tools(prepared, project) == prepared["tools"]
    for name, namespace in (("greet", "team"), ("wave", "team"), ("nod", "acme")):
        ann.publish(name, namespace=namespace)
    ann.exchange("push", f"{tmp_path}/share")
    bob.exchange("pull", f"{tmp_path}/share", dry_run=True)
    assert load_tools(prepared, project) == prepared["tools"]

    bob.exchange("pull", f"{tmp_path}/share")

    assert load_tools(prepared, project) == {}
    lists, _ = settled(bob.project)
    assert all("In source registry: team, acme." in text for text in lists.values())
    bob.publish("shrug", namespace="team")
    assert load_tools(prepared, project) == lists  # there is no other name, so nothing is made again
    bob.publish("bow", namespace="acme")
    bob.publish("clap", namespace="acme")
    assert load_tools(prepared, project) == lists


@pytest.mark.usefixtures("sandbox")
def test_the_namespaces_of_another_registry_are_not_named(
    a_machine: MakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = a_machine("ann", namespaces=["acme"])
    monkeypatch.setenv("USER_SPACE", str(ann.user))
    ann.publish("greet", namespace="acme")
    assert [*known_namespaces(ann.user)] == ["acme"]
    monkeypatch.setenv("KIWI_REGISTRY", f"sqlite://{tmp_path}/other.db")
    assert known_namespaces(ann.user) == ()
    assert "In source registry" not in settled(ann.project)[0]["legacy"]


@pytest.mark.usefixtures("sandbox")
def test_a_namespace_with_only_yanked_versions_is_not_named_until_a_yank_is_reversed(
    a_machine: MakeMachine,
) -> None:
    ann = a_machine("ann", namespaces=["acme", "team"])
    ann.publish("greet", namespace="acme")
    ann.publish("wave", namespace="team")
    ann.publish("wave", "1.1.0", says="ho", namespace="team")

    ann.do("yank", "registry/acme/greet@1.0.0", {"reason": "It is wrong."})
    assert [*known_namespaces(ann.user)] == ["team"]
    ann.do("rollback", "registry/team/wave", {"to": "1.0.0"})
    assert [*known_namespaces(ann.user)] == ["team"]
    ann.do("yank", "registry/acme/greet@1.0.0", {"undo": True})
    assert {*known_namespaces(ann.user)} == {"acme", "team"}


@pytest.mark.usefixtures("sandbox")
def test_namespaces_that_another_actor_saw_are_not_named(a_machine: MakeMachine) -> None:
    ann = a_machine("ann", namespaces=["acme"])
    ann.publish("greet", namespace="acme", visibility="private")
    assert [*known_namespaces(ann.user)] == ["acme"]
    ann.settle(namespaces=["public"])
    assert known_namespaces(ann.user) == ()
    ann.settle(namespaces=["acme"], actor="bob")
    assert known_namespaces(ann.user) == ()


@pytest.mark.usefixtures("sandbox")
def test_items_of_others_in_a_shared_store_are_named_after_the_next_search(
    a_machine: MakeMachine, store_url: str
) -> None:
    ann, bob = (a_machine(name, url=store_url, namespaces=["acme", "team"]) for name in ("ann", "bob"))
    ann.publish("greet", namespace="acme")
    assert known_namespaces(bob.user) == ()
    asyncio.run(search(bob, "greet"))
    assert [*known_namespaces(bob.user)] == ["acme"]

    ann.publish("wave", namespace="team")
    asyncio.run(search(bob, "anything", source="local"))
    assert [*known_namespaces(bob.user)] == ["acme"]
    asyncio.run(search(bob, "anything"))
    assert {*known_namespaces(bob.user)} == {"acme", "team"}


@pytest.mark.usefixtures("sandbox")
def test_a_search_of_an_unchanged_registry_reads_no_namespaces(
    a_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = a_machine("ann", namespaces=["acme"])
    ann.publish("greet", namespace="acme")
    asked: list[int] = []
    names = Registry.namespaces

    def counted(self: Registry) -> tuple[str, ...]:
        asked.append(1)
        return names(self)

    monkeypatch.setattr(Registry, "namespaces", counted)

    asyncio.run(search(ann, "greet", "wave", "nod"))
    assert len(asked) == 1


def test_a_slow_registry_delays_no_list(tmp_path: Path) -> None:
    silences: list[float] = []

    class Silent(Store):
        def registry(self) -> Registry:
            silences.append(silence.get())
            return super().registry()

    store = Silent(tmp_path)
    write_namespaces(tmp_path, store)
    store.close()
    assert silences == [2.0]


def test_a_failed_write_leaves_no_draft(tmp_path: Path) -> None:
    in_the_way = tmp_path / "state" / "servers" / "file"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    touch_server_names(tmp_path)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["servers"]


@pytest.mark.usefixtures("sandbox")
def test_with_an_unreadable_policy_nothing_is_named(tmp_path: Path, a_machine: MakeMachine) -> None:
    ann = a_machine("ann", namespaces=["acme"])
    ann.publish("greet", namespace="acme")
    add(ann.ask, tmp_path, "tracker", 1)

    async def offers() -> Offers:
        try:
            return await ann.kernel.offers()
        finally:
            await ann.kernel.aclose()

    before = asyncio.run(offers())
    assert (before.servers, before.namespaces) == (("tracker",), ("acme",))
    policy = ann.user / "policy.yaml"
    policy.write_text("items: {alow: ['*']}\n")
    broken = asyncio.run(offers())
    assert "nothing else is sent" in broken.notices[0]
    assert (broken.servers, broken.namespaces) == ((), ())
    policy.unlink()
    after = asyncio.run(offers())
    assert (after.servers, after.namespaces) == (before.servers, before.namespaces)


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"namespaces": 3}', "[" * 100_000])
def test_a_damaged_namespace_file_names_none(tmp_path: Path, text: str) -> None:
    place = namespaces_place(tmp_path)
    place.parent.mkdir()
    place.write_text(text)
    assert known_namespaces(tmp_path) == ()


@pytest.mark.usefixtures("sandbox")
def test_a_server_that_this_machine_does_not_list_is_not_named(
    ask: Ask, tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(ask, tmp_path, "tracker", 1)
    add(ask, tmp_path, "diary", 1)
    assert "Installed here: diary, tracker." in settled(project)[0]["legacy"]

    place = tmp_path / "deployment.yaml"
    place.write_text("deployment: managed\nitems: {allow: ['builtin/*', 'mcp/tracker/*']}\n")
    monkeypatch.setenv("KIWI_DEPLOYMENT", str(place))

    assert "Installed here: tracker." in settled(project)[0]["legacy"]


async def test_a_client_sees_only_the_sources_it_may_know(project: Path) -> None:
    class Visited(VisitedKernel):
        def _permission(self) -> ItemVisibility:
            items = Rules(("mcp/tracker/*", "mcp/diary/read@*", "registry/acme/*", "registry/team/greet@*"))
            listed = Grant(items=items, is_secretive=True)
            return ItemVisibility(self.catalog(), lambda: Rights((Grant(), listed)))

    kernel = Visited(project)
    try:
        seen = kernel.seen(Offers(("search",), servers=("diary", "tracker", "vault"), namespaces=("acme", "team")))
    finally:
        await kernel.aclose()
    assert (seen.servers, seen.namespaces) == (("tracker",), ("acme",))


@pytest.mark.usefixtures("sandbox")
def test_a_serving_kernel_notices_a_server_added_by_another_process(ask: Ask, tmp_path: Path, project: Path) -> None:
    async def seen(kernel: Kernel) -> tuple[str, tuple[str, ...]]:
        mark = kernel.offers_mark()
        return mark, (await kernel.offers()).servers

    kernel = Kernel(project, is_owner=False)
    try:
        assert asyncio.run(seen(kernel))[1] == ()
        mark = kernel.offers_mark()
        add(ask, tmp_path, "tracker", 1)
        changed, servers = asyncio.run(seen(kernel))
    finally:
        asyncio.run(kernel.aclose())
    assert (changed != mark, servers) == (True, ("tracker",))
