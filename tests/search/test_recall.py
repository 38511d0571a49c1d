"""Items used after a search are found sooner by similar searches, separately for each actor and without secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, current_thread, main_thread

import numpy as np
import pytest

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.context import recall_access
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.search.index import SIZE
from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.query import parse_query
from kiwi_mcp.search.recall import RecallWorker
from kiwi_mcp.search.recall_log import (
    BETWEEN,
    ENOUGH,
    FIRST,
    MINUTES,
    RecentSearches,
    Searcher,
    SearchIntent,
    storable_part,
    storable_text,
)
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.search_index.recall import MAX_LENGTH

Ask = Callable[..., Answer]
ANA, BEN = Searcher("ana", "editor", "/work"), Searcher("ben", "editor", "/work")


class Letters:
    """An encoder to which texts mean the same that have the same letters, and which counts what it is asked for."""

    name, dimension = "letters", 384

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> Floats:
        self.texts += texts
        rows = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for letter in text.lower():
                row[ord(letter) % 64] += 1
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


class Slow(Store):
    """A store that lets the thread in the background wait."""

    def __init__(self, user: Path) -> None:
        super().__init__(user)
        self.is_asked, self.may_go_on = Event(), Event()

    def registry(self) -> Registry:
        if current_thread() is not main_thread():
            self.is_asked.set()
            assert self.may_go_on.wait(120)
        return super().registry()


@pytest.fixture(autouse=True)
def items(project: Path) -> None:
    folder = project / ".ai" / "directives"
    folder.mkdir()
    response = {"umbrella": "Tell whether it will rain", "ledger": "Add up what was spent", "parcel": "Follow a parcel"}
    for name, text in response.items():
        step = "<step name='one'><action>Go</action></step>"
        body = f"<metadata><description>{text}</description></metadata>\n<process>{step}"
        (folder / f"{name}.md").write_text(
            f'# {name}\n\n```xml\n<directive name="{name}" version="1.0.0">\n{body}</process>\n</directive>\n```\n'
        )


def names(answer: Answer) -> list[str]:
    return [as_text(as_object(one)["name"]) for one in as_list(answer.content["results"])]


def remembered(answer: Answer) -> list[tuple[str, str, str]]:
    rows = [as_object(one) for one in as_list(answer.content["remembered"])]
    return [(as_text(one["item"]), as_text(one["used"]), as_text(one["request"])) for one in rows]


async def calls(kernel: Kernel, requests: Sequence[tuple[str, JsonObject]], caller: Caller) -> list[Answer]:
    try:
        return [await kernel.call(verb, request, caller) for verb, request in requests]
    finally:
        await kernel.aclose()


def do(kernel: Kernel, *requests: tuple[str, JsonObject], caller: Caller) -> list[Answer]:
    return asyncio.run(calls(kernel, requests, caller))


def run(name: str) -> tuple[str, JsonObject]:
    return "execute", {"item_id": name}


def search(query: str) -> tuple[str, JsonObject]:
    return "search", {"query": query}


def test_an_item_that_was_run_after_a_search_is_found_by_a_similar_search(
    home: Path, kernel: Kernel, owner: Caller
) -> None:
    need = "do I need a coat for my walk, or will it rain"
    first, ran = do(kernel, search(need), run("umbrella"), caller=owner)
    assert names(first) == ["umbrella"]
    assert not ran.is_error
    again, plain = do(kernel, search("a coat for the walk?"), search("what was spent"), caller=owner)
    assert names(again) == ["umbrella"]
    assert as_object(as_list(again.content["results"])[0])["remembered"] is True
    assert names(plain) == ["ledger"]
    (response,) = do(kernel, ("memory", {}), caller=owner)
    assert remembered(response) == [("project/local/umbrella", "run", need)]


@pytest.mark.parametrize("is_noted", [True, False])
def test_an_item_that_answers_a_part_is_remembered_for_that_part(
    home: Path, project: Path, owner: Caller, is_noted: bool
) -> None:
    kernel = Kernel(project, surface="cli", is_short_lived=is_noted)
    do(kernel, search("tell whether it will rain and add up what was spent"), run("ledger"), caller=owner)
    (response,) = do(kernel, ("memory", {}), caller=owner)
    assert remembered(response) == [("project/local/ledger", "run", "add up what was spent")]


def test_a_load_is_remembered_and_a_run_counts_more(home: Path, kernel: Kernel, owner: Caller) -> None:
    read, ran = ("load", {"item_id": "parcel"}), run("parcel")
    *_, response = do(kernel, search("follow my parcel"), read, caller=owner), *do(kernel, ("memory", {}), caller=owner)
    assert remembered(response) == [("project/local/parcel", "load", "follow my parcel")]
    do(kernel, search("follow my parcels"), read, ran, caller=owner)
    (response,) = do(kernel, ("memory", {}), caller=owner)
    assert remembered(response) == [("project/local/parcel", "run", "follow my parcels")]


def test_an_item_that_was_not_shown_or_did_not_run_is_not_remembered(home: Path, kernel: Kernel, owner: Caller) -> None:
    do(kernel, search("will it rain"), run("ledger"), run("nowhere"), search("ledger"), run("ledger"), caller=owner)
    (response,) = do(kernel, ("memory", {}), caller=owner)
    assert response.content["remembered"] == []


def test_a_use_after_browsing_is_remembered_by_the_last_real_query(home: Path, kernel: Kernel, owner: Caller) -> None:
    do(kernel, search("whether it will rain"), search("*"), run("umbrella"), caller=owner)
    do(kernel, search("*"), run("ledger"), caller=owner)
    (response,) = do(kernel, ("memory", {}), caller=owner)
    assert [request for _, _, request in remembered(response)] == ["whether it will rain"]


def test_one_actor_learns_nothing_from_another(home: Path, kernel: Kernel) -> None:
    ana, ben = Caller(name="token:ana:1"), Caller(name="token:ben:2")
    do(kernel, search("a coat against rain"), run("umbrella"), caller=ana)
    theirs, listed = do(kernel, search("a coat, please"), ("memory", {}), caller=ben)
    assert names(theirs) == []
    assert listed.content["remembered"] == []
    mine, listed = do(kernel, search("a coat, please"), ("memory", {}), caller=ana)
    assert names(mine) == ["umbrella"]
    assert len(as_list(listed.content["remembered"])) == 1


def test_a_name_similar_to_the_owner_is_not_the_owner(home: Path, project: Path, kernel: Kernel, owner: Caller) -> None:
    do(kernel, search("a coat against rain"), run("umbrella"), caller=owner)
    name = Store(home / ".ai").actor.name
    assert name
    for namesake in (name, f"={name}", "="):
        guest = Kernel(project, is_owner=False, surface="gateway")
        found, listed, _ = do(
            guest,
            search("a coat, please"),
            ("memory", {}),
            ("memory", {"action": "forget"}),
            caller=Caller(name=namesake),
        )
        assert names(found) == []
        assert listed.content["remembered"] == []
    (response,) = do(kernel, ("memory", {}), caller=owner)
    assert [request for _, _, request in remembered(response)] == ["a coat against rain"]


def test_one_setting_switches_it_off(home: Path, kernel: Kernel, owner: Caller) -> None:
    do(kernel, search("a coat against rain"), run("umbrella"), caller=owner)
    (home / ".ai" / "registry.yaml").write_text("remember: false\n")
    off, _, _, listed = do(
        kernel, search("a coat, please"), search("rain or sun"), run("umbrella"), ("memory", {}), caller=owner
    )
    assert names(off) == []
    assert [request for _, _, request in remembered(listed)] == ["a coat against rain"]
    assert listed.content["is_on"] is False


def test_a_forgotten_item_has_no_effect(home: Path, kernel: Kernel, owner: Caller) -> None:
    do(kernel, search("a coat against rain"), run("umbrella"), search("parcel of rain"), run("parcel"), caller=owner)
    forgot, response = do(kernel, ("memory", {"action": "forget", "item": "umbrella"}), ("memory", {}), caller=owner)
    assert forgot.content["forgotten"] == 1
    assert [item for item, _, _ in remembered(response)] == ["project/local/parcel"]
    everything, again = do(kernel, ("memory", {"action": "forget"}), search("a coat, please"), caller=owner)
    assert everything.content["message"] == "1 remembered request forgotten"
    assert names(again) == []
    (unknown,) = do(kernel, ("memory", {"action": "forget", "item": "umbrella"}), caller=owner)
    assert unknown.content["code"] == "invalid_request"


def test_a_model_does_not_see_queries_of_the_owner(home: Path, project: Path) -> None:
    answer, forgot = do(
        Kernel(project, is_owner=False, surface="mcp"),
        ("memory", {}),
        ("memory", {"action": "forget"}),
        caller=Caller(),
    )
    assert (answer.content["code"], forgot.content["code"]) == ("not_permitted", "not_permitted")


def test_no_secret_reaches_the_store(home: Path, project: Path, kernel: Kernel, owner: Caller) -> None:
    (project / ".env").write_text("CRM_KEY=blue-walrus-nine\n")
    query = (
        "will it rain, blue-walrus-nine, password: hunter2, ghp_aB3dE5fG7hJ9kL1m, me@example.org, 4929 1234 5678 9012"
    )
    do(kernel, search(query), run("umbrella"), caller=owner)
    (response,) = do(kernel, ("memory", {}), caller=owner)
    ((_, _, kept),) = remembered(response)
    assert kept.startswith("will it rain, ")
    for secret in ("walrus", "hunter2", "ghp_", "example.org", "4929", "9012"):
        assert secret not in kept
    database = (home / ".ai" / "state" / "registry.db").read_bytes()
    assert b"walrus" not in database


def test_a_search_counts_for_some_minutes_and_for_its_caller() -> None:
    now = 0.0
    recent = RecentSearches(clock=lambda: now)
    recent.add(ANA, "will it rain", [("user/local/umbrella@1.0.0", 0.5)])
    assert recent.used(BEN, "user/local/umbrella@1.0.0", is_run=True) is None
    assert recent.used(ANA._replace(project="/other"), "user/local/umbrella@1.0.0", is_run=True) is None
    now = MINUTES * 60.0
    assert recent.used(ANA, "user/local/umbrella@2.0.0", is_run=True) == SearchIntent("will it rain")
    assert recent.used(ANA, "user/local/umbrella@2.0.0", is_run=True) is None
    now += 1
    recent.add(ANA, "what was spent", [("user/local/ledger@1.0.0", 0.5)])
    now += MINUTES * 60.0 + 1
    assert recent.used(ANA, "user/local/ledger@1.0.0", is_run=False) is None


def test_a_long_query_is_cut_at_a_word_and_an_empty_one_is_not_stored() -> None:
    kept = storable_text("word " * 1_000, {})
    assert len(kept) <= MAX_LENGTH
    assert kept.endswith("word")
    assert storable_text(" … ? ", {}) == ""


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("log in with password hunter2", "log in with password …"),
        ("log in, pass hunter2", "log in, pass …"),
        ("unlock with my pin 4921", "unlock with my pin …"),
        ("open it with the secret word: swordfish", "open it with the secret …"),
        ("deploy, passphrase correct horse battery", "deploy, passphrase …"),
        ("set DB_PASSWORD=a1 and API_KEYS=b2", "set DB_PASSWORD …"),
        ("send with accessToken abc\ndef", "send with accessToken …"),
        ("log in, swordfish is my password", "log in, … is my password"),
        ("use swordfish as the wifi password", "use … as the wifi password"),
        ("password hunter2, then log in", ""),
        ("reset my password?", "reset my password?"),
        ("ask the secretary for the passenger list and feed the monkeys", None),
        ("tokenize a text", None),
    ],
)
def test_text_after_a_secret_word_is_not_stored(said: str, kept: str | None) -> None:
    assert storable_text(said, {}) == (said if kept is None else kept)


@pytest.mark.parametrize(
    ("request_", "part", "kept"),
    [
        ("look up the rain; write to me@example.org", "write to me@example.org", "write to …"),
        ("open it with password horse. Battery staple then", "Battery staple then", "open it with password …"),
        ("say blue. Walrus nine. Then look up the rain", "Walrus nine", "say [redacted:NOTE] Then look up the rain"),
        ("say blue. Walrus nine. Then look up the rain", "look up the rain", "look up the rain"),
    ],
)
def test_a_stored_part_contains_only_text_of_the_whole(request_: str, part: str, kept: str) -> None:
    assert storable_part(SearchIntent(request_, part), {"NOTE": "blue. Walrus nine."}) == kept


@pytest.mark.parametrize("is_noted", [True, False])
def test_each_item_is_remembered_by_the_part_it_answers(tmp_path: Path, is_noted: bool) -> None:
    file = tmp_path / "searches.json" if is_noted else None
    recent, rain, spent = RecentSearches(file), "user/local/umbrella@1.0.0", "user/local/ledger@1.0.0"
    recent.add(ANA, "is there rain; ledger", [(rain, 0.5), (spent, 0.5)], {rain: "is there rain", spent: "ledger"})
    recent = RecentSearches(file) if is_noted else recent
    assert recent.used(ANA, rain, is_run=True) == SearchIntent("is there rain; ledger", "is there rain")
    assert recent.used(ANA, spent, is_run=True) is None  # its own name


def test_a_search_for_a_name_is_not_remembered() -> None:
    recent = RecentSearches()
    recent.add(ANA, "umbrella", [("user/local/umbrella@1.0.0", 1.0)])
    assert recent.used(ANA, "user/local/umbrella@1.0.0", is_run=True) is None


@pytest.mark.parametrize(
    ("place", "score", "is_found"), [(FIRST - 1, 0.1, True), (FIRST, 0.1, False), (FIRST, ENOUGH, True)]
)
def test_a_weak_hit_far_down_is_not_remembered(place: int, score: float, is_found: bool) -> None:
    recent = RecentSearches()
    above = [(f"user/local/other{number}@1.0.0", 0.6) for number in range(place)]
    recent.add(ANA, "all that is here", [*above, ("user/local/umbrella@1.0.0", score)])
    assert recent.used(ANA, "user/local/umbrella@1.0.0", is_run=True) == (
        SearchIntent("all that is here") if is_found else None
    )


def test_only_the_latest_search_that_showed_an_item_counts() -> None:
    recent, many = RecentSearches(), [(f"user/local/other{number}@1.0.0", 0.6) for number in range(FIRST)]
    recent.add(ANA, "will it rain", [("user/local/umbrella@1.0.0", 0.5)])
    recent.add(ANA, "all that is here", [*many, ("user/local/umbrella@1.0.0", 0.1)])
    assert recent.used(ANA, "user/local/umbrella@1.0.0", is_run=True) is None
    recent.add(ANA, "rain or sun", [("user/local/umbrella@1.0.0", 0.5)])
    assert recent.used(ANA, "user/local/umbrella@1.0.0", is_run=True) == SearchIntent("rain or sun")


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize(("others", "is_found"), [(BETWEEN, True), (BETWEEN + 1, False)])
def test_after_many_other_searches_a_use_is_not_assigned(
    tmp_path: Path, others: int, is_found: bool, is_noted: bool
) -> None:
    file = tmp_path / "searches.json" if is_noted else None
    recent = RecentSearches(file)
    recent.add(ANA, "will it rain", [("user/local/umbrella@1.0.0", 0.5)])
    for need in [f"need {number // 2}" for number in range(2 * others)]:  # to ask again is no other search
        (RecentSearches(file) if is_noted else recent).add(ANA, need, [("user/local/ledger@1.0.0", 0.5)])
    found = (RecentSearches(file) if is_noted else recent).used(ANA, "user/local/umbrella@1.0.0", is_run=True)
    assert found == (SearchIntent("will it rain") if is_found else None)


def test_unreadable_settings_are_reported_once_and_nothing_is_remembered(
    home: Path, kernel: Kernel, owner: Caller
) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "registry.yaml").write_text("remember: maybe\n")
    looks: list[tuple[str, JsonObject]] = [
        search("will it rain"),
        ("search", {"query": "will it rain", "source": "project"}),
        ("load", {"item_id": "umbrella"}),
    ]
    for answer in do(kernel, *looks, caller=owner):
        (warning,) = [as_text(one) for one in as_list(answer.content["warnings"])]
        assert "remember: says neither yes nor no" in warning
        assert "receipt" not in warning
    (home / ".ai" / "registry.yaml").write_text("remember: true\n")
    (response,) = do(kernel, ("memory", {}), caller=owner)
    assert response.content["remembered"] == []


def test_consecutive_commands_are_remembered_too(home: Path, project: Path, owner: Caller) -> None:
    def command(*request: tuple[str, JsonObject]) -> list[Answer]:
        return do(Kernel(project, surface="cli", is_short_lived=True), *request, caller=owner)

    command(search("a coat against rain, password: hunter2"))
    noted = home / ".cache" / "kiwi" / "searches.json"
    assert "hunter2" not in noted.read_text()
    assert noted.stat().st_mode & 0o777 == 0o600
    command(run("umbrella"))
    (response,) = command(("memory", {}))
    assert [item for item, _, _ in remembered(response)] == ["project/local/umbrella"]
    command(("memory", {"action": "forget"}))
    assert not noted.exists()


@pytest.mark.parametrize(
    "said", ["", "[]", "{", '{"who": 1}', '{"who": ["ana", "editor", "/work"], "searches": [1, {}]}']
)
def test_an_invalid_note_is_ignored(tmp_path: Path, said: str) -> None:
    (tmp_path / "searches.json").write_text(said)
    assert RecentSearches(tmp_path / "searches.json").used(ANA, "user/local/umbrella", is_run=True) is None


def test_forgetting_one_item_keeps_unwritten_entries_of_another(home: Path, project: Path) -> None:
    space, store = Space(project, home / ".ai", home / ".cache"), Slow(home / ".ai")
    store.registry()
    memories = RecallWorker(recall_access(store))
    memories.add("", "user/local/ledger@1.0.0", SearchIntent("what was spent"), space, is_run=True)
    assert store.is_asked.wait(120)
    memories.add("", "user/local/umbrella@1.0.0", SearchIntent("will it rain"), space, is_run=True)
    memories.add("", "user/local/parcel@1.0.0", SearchIntent("where is it"), space, is_run=True)
    memories.forget("", ["user/local/umbrella"])
    store.may_go_on.set()
    assert memories.wait_until_stored(20)
    assert {trace.item for trace in memories.entries("")} == {"user/local/ledger", "user/local/parcel"}
    memories.close()
    store.close()


def test_a_query_is_encoded_once_in_the_background(home: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIWI_SEARCH", "meaning")
    space, store, asked = Space(project, home / ".ai", home / ".cache"), Store(home / ".ai"), Letters()
    memories = RecallWorker(recall_access(store), lambda: asked, asked.name)
    need = parse_query("a coat against rain", asked)
    assert memories.recall("", space, need) is None
    asked.texts.clear()
    for number in range(20):
        memories.add(
            "",
            "user/local/umbrella@1.0.0",
            SearchIntent(f"rain{chr(97 + number)} coat{chr(97 + number)}"),
            space,
            is_run=True,
        )
    assert memories.wait_until_stored(20)
    known = memories.entries("")
    assert {trace.encoder for trace in known} == {"letters"}
    assert sorted(asked.texts) == sorted(trace.request for trace in known)
    recall = memories.recall("", space, need)
    assert recall is not None
    assert recall.found == ["user/local/umbrella"]
    memories.close()
    again = RecallWorker(recall_access(store), lambda: asked, asked.name)
    asked.texts.clear()
    again.recall("", space, need)
    assert again.wait_until_stored(20)
    assert again.recall("", space, need) == recall
    assert asked.texts == []
    again.close()
    store.close()


def test_a_damaged_query_vector_is_encoded_again(home: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIWI_SEARCH", "meaning")
    space, store, asked = Space(project, home / ".ai", home / ".cache"), Store(home / ".ai"), Letters()
    memories = RecallWorker(recall_access(store), lambda: asked, asked.name)
    memories.add("", "user/local/umbrella@1.0.0", SearchIntent("a coat against rain"), space, is_run=True)
    need = parse_query("a coat against rain", asked)
    memories.recall("", space, need)
    assert memories.wait_until_stored(20)
    memories.close()
    with store.registry().database.transaction() as transaction:
        transaction.write("update remembered set vector = ?", (b"short",))

    again = RecallWorker(recall_access(store), lambda: asked, asked.name)
    again.recall("", space, need)
    assert again.wait_until_stored(20)
    (trace,) = again.entries("")
    assert (trace.encoder, len(trace.vector)) == ("letters", SIZE)
    again.close()
    store.close()
