"""Search answers: short cards with reasons, filters with known values, and help when nothing is found."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.plugins.machines import Machine

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.grants import Grant, Rights, Rules
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.verb import SearchRequest
from kiwi_mcp.kernel.verbs.search import find
from kiwi_mcp.search.encoder import EncodingCancelled
from kiwi_mcp.search.indexes import SearchIndexes
from kiwi_mcp.search.port import Floats

SCRIPT = Path(__file__).parents[1] / "data" / "mcp" / "scripted.py"
FIELDS = {"name", "description", "source", "path", "score", "tool_type", "identity", "why"}
MOST_BYTES = 450
"""What a card with a long description may take up, but for its path."""
Ask = Callable[..., Answer]


def script(name: str, description: str, *words: str) -> str:
    head = f'"""{description}"""\n__version__ = "1.0.0"\n__tool_type__ = "script"\n__executor_id__ = "python_runtime"\n'
    return "\n".join((head, *words, "\n\ndef main():\n    return 1\n"))


@pytest.fixture(autouse=True)
def tools(project: Path) -> None:
    for path, description in {
        "mail/send_letter": "Send a letter to a person by mail",
        "mail/read_letters": "Read the letters in the mailbox",
        "maps/find_route": "Find the way between two cities",
        "maps/draw_map": "Draw a map of a city",
    }.items():
        file = project / ".ai" / "tools" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script(file.stem, description, '__tags__ = ["office"]' if "mail" in path else ""))


@pytest.fixture
def serve(ask: Ask, tmp_path: Path, sandbox: None) -> Callable[..., None]:
    """Add a server that offers some tools."""

    def add(server: str, **tools: str) -> None:
        offers = tmp_path / f"{server}.json"
        schema = {"type": "object", "properties": {"text": {"type": "string", "description": "What to look for"}}}
        offered = [{"name": name, "description": said, "inputSchema": schema} for name, said in tools.items()]
        offers.write_text(json.dumps({"tools": offered}))
        added = ask("mcp", action="add", server=server, command=sys.executable, args=[str(SCRIPT), str(offers)])
        assert not added.is_error

    return add


def search(ask: Ask, query: str, **words: Json) -> JsonObject:
    answer = ask("search", query=query, **words)
    assert not answer.is_error, answer.content
    return answer.content


def cards(content: JsonObject) -> list[JsonObject]:
    return [*map(as_object, as_list(content["results"]))]


def names(content: JsonObject) -> list[str]:
    return [as_text(card["name"]) for card in cards(content)]


@pytest.mark.req("E3", "K-SE-02")
def test_a_card_has_type_score_and_reason_and_no_schema(ask: Ask) -> None:
    found = search(ask, "send a letter to my aunt")

    first = cards(found)[0]
    assert first.keys() == FIELDS
    assert (first["name"], first["identity"]) == ("send_letter", "project/local/send_letter@1.0.0")
    assert {*as_list(first["why"])} == {"send", "letter"}
    scores = [float(str(card["score"])) for card in cards(found)]
    assert all(0 < score <= 1 for score in scores)
    assert scores == sorted(scores, reverse=True)
    assert "properties" not in compact(found)
    assert found.keys() == {"results", "total", "query", "source"}


@pytest.mark.req("E3")
def test_an_answer_has_the_requested_number_of_short_cards(ask: Ask, project: Path) -> None:
    for number in range(30):
        path = project / ".ai" / "tools" / f"letter_{number}.py"
        path.write_text(script(path.stem, "Write a letter " + "to a person " * 100))

    found = search(ask, "write a letter to a person")
    assert len(cards(found)) == 10
    assert int(str(found["total"])) > 30
    assert all(len(compact({**card, "path": ""})) <= MOST_BYTES for card in cards(found))
    assert len(cards(search(ask, "write a letter", limit=3))) == 3


def test_a_request_for_several_things_names_the_part_that_each_card_answers(ask: Ask) -> None:
    found = search(ask, "Read the letters in my mailbox, then find the way between the cities")

    assert found["parts"] == ["Read the letters in my mailbox", "find the way between the cities"]
    answered = {card["name"]: card["part"] for card in cards(found)}
    assert (answered["read_letters"], answered["find_route"]) == (1, 2)


@pytest.mark.req("B6")
def test_a_hit_that_is_not_permitted_names_the_rule(ask: Ask, home: Path) -> None:
    (home / ".ai").mkdir()
    (home / ".ai" / "policy.yaml").write_text("items: {allow: ['*'], deny: ['*/send_letter@*']}\n")

    by_name = {card["name"]: card for card in cards(search(ask, "letter"))}

    assert by_name["send_letter"]["permitted"] is False
    assert "'*/send_letter@*'" in as_text(by_name["send_letter"]["not_permitted"])
    assert len(as_text(by_name["send_letter"]["not_permitted"])) <= 200
    assert by_name["read_letters"].keys() == FIELDS


@pytest.mark.req("K-SE-02")
@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ({"category": "maps"}, {"draw_map", "find_route"}),
        ({"category": ["maps", "mail"], "limit": 50}, {"draw_map", "find_route", "send_letter", "read_letters"}),
        ({"category": "maps,mail"}, {"draw_map", "find_route", "send_letter", "read_letters"}),
        ({"tag": "office"}, {"send_letter", "read_letters"}),
        ({"tool_type": "script,api"}, {"draw_map", "find_route", "send_letter", "read_letters", "loose"}),
        ({"server": "outbox"}, {"post"}),
        ({"source": "mcp"}, {"post"}),
        ({"server": "outbox", "tag": "office"}, set()),
    ],
)
def test_filters_select_items_with_one_of_their_values(
    ask: Ask, project: Path, serve: Callable[..., None], words: dict[str, Json], kept: set[str]
) -> None:
    serve("outbox", post="Post a letter for a city, with a map")
    (project / ".ai" / "tools" / "loose.py").write_text(script("loose", "A letter"))

    assert {*names(search(ask, "letter map city cities", **words))} == kept


@pytest.mark.req("K-SE-02")
def test_hits_are_ordered_by_score_date_or_name(ask: Ask) -> None:
    assert names(search(ask, "draw a map of the city", sort_by="name")) == ["draw_map", "find_route"]
    assert names(search(ask, "find a route in the city", sort_by="score"))[0] == "find_route"
    assert ask("search", query="x", sort_by="magic").content["code"] == "invalid_request"


@pytest.mark.parametrize("query", ["", "  ", "*"])
def test_an_empty_query_lists_all_items_that_pass_the_filters_by_name(ask: Ask, query: str) -> None:
    everything = search(ask, query)
    assert names(everything) == ["draw_map", "find_route", "read_letters", "send_letter"]
    assert all(0 < float(str(card["score"])) <= 1 for card in cards(everything))
    assert "note" not in everything

    some = search(ask, query, tag="office", limit=1)
    assert (names(some), some["total"]) == (["read_letters"], 2)
    assert "there are `mail`, `maps`" in as_text(search(ask, query, category="cars")["suggestion"])


@pytest.mark.usefixtures("sandbox")
def test_an_invalid_yaml_file_is_reported_by_search_and_doctor(ask: Ask, project: Path) -> None:
    path = project / ".ai" / "tools" / "broken.yaml"
    path.write_text("garbage: [")
    (project / ".ai" / "tools" / "values.yaml").write_text("speed: 3\n")

    (response,) = [*map(as_object, as_list(search(ask, "letter")["broken"]))]
    assert response["path"] == str(path)
    assert "not YAML" in as_text(response["message"])
    checks = [*map(as_object, as_list(ask("doctor").content["checks"]))]
    assert [one["status"] for one in checks if one["check"] == str(path)] == ["problem"]
    for answer in (
        ask("execute", action="validate", item_id="broken"),
        ask("execute", action="validate", parameters={"path": str(path)}),
    ):
        assert "not YAML" in as_text(answer.content["message"])


def test_an_unknown_filter_value_is_answered_with_the_known_ones(ask: Ask, serve: Callable[..., None]) -> None:
    serve("outbox", post="Post a letter")

    response = as_text(search(ask, "letter", server="inbox", tag="home")["suggestion"])
    assert "There is no server 'inbox'; there are `outbox`." in response
    assert "There is no tag 'home'; there are" in response
    assert "`office`" in response
    assert "`maps`" in as_text(search(ask, "letter", category="cars")["suggestion"])
    assert "passes all of these filters" in as_text(search(ask, "letter", server="outbox", tag="office")["suggestion"])


def test_a_server_without_tools_is_reported(ask: Ask, serve: Callable[..., None]) -> None:
    serve("outbox", post="Post a letter")
    serve("attic")

    response = as_text(search(ask, "letter", server="attic")["suggestion"])
    assert response == (
        "The server 'attic' is here, and offers nothing of this: "
        "`kiwi mcp list attic` says why, `kiwi mcp refresh attic` asks it again."
    )


def test_a_search_without_hits_names_similar_items_and_how_to_search(ask: Ask, serve: Callable[..., None]) -> None:
    serve("outbox", post="Post a letter", parcel="Pack things")

    found = search(ask, "parsellls")

    assert (found["results"], found["total"]) == ([], 0)
    assert [as_object(one)["identity"] for one in as_list(found["close"])] == ["mcp/outbox/parcel@1.2.0"]
    response = as_text(found["suggestion"])
    assert "one need per search" in response
    assert "Here: servers `outbox`; categories `mail`, `maps`." in response
    assert "`source: all`" in response
    far = search(ask, "zzqqxx")
    assert "close" not in far
    assert "Try other words." in as_text(far["suggestion"])


def test_a_poor_match_is_called_weak_and_a_good_one_is_not(ask: Ask) -> None:
    poor = search(ask, "order fifty metal buckets for some rainy gardens near every city house of theirs")

    assert cards(poor)
    assert as_text(poor["note"]).startswith("Weak match")
    assert "note" not in search(ask, "find the way between two cities")
    assert "note" not in search(ask, "send_letter")


@pytest.mark.req("E6")
def test_two_items_of_one_name_are_found_loaded_called_permitted_and_recorded_separately(
    ask: Ask, serve: Callable[..., None], home: Path
) -> None:
    serve("tracker", search="Search the issues of a project")
    serve("library", search="Search the books of a library")

    both = cards(search(ask, "search", source="mcp"))
    assert {card["full_name"] for card in both} == {"mcp/tracker/search", "mcp/library/search"}
    assert cards(search(ask, "search books"))[0]["full_name"] == "mcp/library/search"
    assert [card["identity"] for card in cards(search(ask, "search", server="tracker"))] == ["mcp/tracker/search@1.2.0"]
    for card in both:
        name = as_text(card["full_name"])
        loaded = ask("load", item_id=name).content
        assert (loaded["identity"], as_object(loaded["metadata"])["description"]) == (
            card["identity"],
            card["description"],
        )
        assert not ask("execute", item_id=name).is_error
    (home / ".ai" / "policy.yaml").write_text("items: {allow: ['*'], deny: ['mcp/library/*']}\n")
    assert {card["full_name"]: card.get("permitted", True) for card in cards(search(ask, "search", source="mcp"))} == {
        "mcp/tracker/search": True,
        "mcp/library/search": False,
    }
    assert ask("execute", item_id="mcp/library/search").content["code"] == "not_permitted"
    assert not ask("execute", item_id="mcp/tracker/search").is_error
    ran = {as_object(run).get("identity") for run in as_list(ask("runs").content["runs"])}
    assert {"mcp/tracker/search@1.2.0", "mcp/library/search@1.2.0"} <= ran


class Rainy:
    """An encoder for which everything is about rain."""

    name, dimension = "rainy", 384

    def encode(self, texts: Sequence[str]) -> Floats:
        rows = np.zeros((len(texts), self.dimension), np.float32)
        rows[:, 0] = 1
        return rows


class Slow(Rainy):
    """An encoder that never comes to an end of it."""

    def encode(self, texts: Sequence[str]) -> Floats:
        raise EncodingCancelled


def test_a_card_that_was_found_by_meaning_is_marked(project: Path, tmp_path: Path) -> None:
    catalog = Catalog(Space(project, tmp_path / "user", tmp_path / "cache"))
    library = SearchIndexes(load=Rainy)
    asked = SearchRequest(query="umbrella")
    find(asked, catalog, library)
    assert library.wait_until_indexed(30)
    try:
        first = cards(find(asked, catalog, library))[0]
        by_words = cards(find(SearchRequest(query="letters"), catalog, library))[0]
    finally:
        library.close()
    assert (first["why"], first["meaning"]) == ([], 1.0)
    assert "meaning" not in by_words


def test_a_hidden_item_is_neither_found_nor_suggested(machine: Machine) -> None:
    for name in ("open_door", "secret_door"):
        machine.script(name)
    listed = Grant(items=Rules(("project/local/open_door@*", "builtin/*")), is_secretive=True)
    catalog = Catalog(Space(machine.project, machine.user, machine.cache))
    library = SearchIndexes(load=lambda: None)
    try:
        for query in ("door", "secret_door", "secre", "tsecret", "nothing_like_it", "doo"):
            response = compact(
                find(SearchRequest(query=query), catalog, library, rights=lambda: Rights((Grant(), listed)))
            )
            assert "project/local/secret_door" not in response
            assert "`secret_door`" not in response
    finally:
        library.close()


def test_a_hidden_item_shows_in_no_name_count_or_error(machine: Machine) -> None:
    machine.script("open_door")
    for path in ("open_door/main.sh", "open_door/tool.yaml"):
        twin = machine.user / "tools" / path
        twin.parent.mkdir(parents=True, exist_ok=True)
        twin.write_bytes((machine.project / ".ai" / "tools" / path).read_bytes())
    machine.put("tools/vault/tool.yaml", "tool_id: [vault\n")
    listed = Grant(items=Rules(("project/local/open_door@*",)), is_secretive=True)
    catalog = Catalog(Space(machine.project, machine.user, machine.cache))
    library = SearchIndexes(load=Slow)
    request = SearchRequest(query="open_door")
    try:
        response = find(request, catalog, library, rights=lambda: Rights((Grant(), listed)))
        everything = find(request, catalog, library)
    finally:
        library.close()
    assert response.keys() == {"results", "total", "query", "source"}
    assert [card["identity"] for card in cards(response)] == ["project/local/open_door@1.0.0"]
    assert "full_name" not in cards(response)[0]
    assert {"broken", "indexing"} <= everything.keys()
    assert all("full_name" in card for card in cards(everything))


@pytest.mark.parametrize("verb", ["search", "load"])
def test_with_unreadable_rules_only_the_owner_sees_items(machine: Machine, verb: str) -> None:
    machine.script("open_door")
    (machine.user / "policy.yaml").write_text("items: [")
    words: JsonObject = {"query": "door"} if verb == "search" else {"item_id": "open_door"}
    asked = [asyncio.run(machine.kernel.call(verb, words, caller)) for caller in (Caller(name="bob"), Caller())]
    asyncio.run(machine.kernel.aclose())
    assert [answer.is_error for answer in asked] == [True, False]
    assert "open_door" not in compact(asked[0].content)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "ann")


def test_built_in_items_that_match_well_fill_the_places_behind_the_owners(ask: Ask) -> None:
    found = cards(search(ask, "read a text file of the project"))
    sources = [as_text(card["source"]) for card in found]
    own = len(sources) - sources.count("builtin")
    assert own > 0
    assert set(sources[own:]) == {"builtin"}
    assert found[own]["identity"] == "builtin/kiwi/files_read@1.0.0"
    assert {"runtime", "primitive"}.isdisjoint(as_text(card["tool_type"]) for card in found)
    assert "builtin" not in {card["source"] for card in cards(search(ask, "read a text file", limit=own))}
    assert "builtin" not in {card["source"] for card in cards(search(ask, "find the way between two cities"))}
