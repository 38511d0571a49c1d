"""What is used after a search is found sooner by the next one like it: for each actor apart, and without secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, current_thread, main_thread

import numpy as np
import pytest

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.recent import BETWEEN, ENOUGH, FIRST, MINUTES, Recent, Wanted, Who
from kiwi_mcp.kernel.remembering import LONGEST, kept_of, kept_text
from kiwi_mcp.kernel.searching.memories import Memories
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.request import read_request
from kiwi_mcp.search.sheet import SIZE
from kiwi_mcp.store.registry import Registry

Ask = Callable[..., Answer]
ANA, BEN = Who("ana", "editor", "/work"), Who("ben", "editor", "/work")


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
            assert self.may_go_on.wait(20)
        return super().registry()


@pytest.fixture(autouse=True)
def items(project: Path) -> None:
    folder = project / ".ai" / "directives"
    folder.mkdir()
    told = {"umbrella": "Tell whether it will rain", "ledger": "Add up what was spent", "parcel": "Follow a parcel"}
    for name, text in told.items():
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


def test_what_was_run_after_a_search_is_found_by_one_like_it(home: Path, kernel: Kernel, owner: Caller) -> None:
    need = "do I need a coat for my walk, or will it rain"
    first, ran = do(kernel, search(need), run("umbrella"), caller=owner)
    assert names(first) == ["umbrella"]
    assert not ran.is_error
    again, plain = do(kernel, search("a coat for the walk?"), search("what was spent"), caller=owner)
    assert names(again) == ["umbrella"]
    assert as_object(as_list(again.content["results"])[0])["remembered"] is True
    assert names(plain) == ["ledger"]
    (told,) = do(kernel, ("memory", {}), caller=owner)
    assert remembered(told) == [("project/local/umbrella", "run", need)]


@pytest.mark.parametrize("is_noted", [True, False])
def test_what_answers_a_part_of_a_request_is_remembered_for_that_part(
    home: Path, project: Path, owner: Caller, is_noted: bool
) -> None:
    kernel = Kernel(project, surface="cli" if is_noted else "mcp")
    do(kernel, search("tell whether it will rain and add up what was spent"), run("ledger"), caller=owner)
    (told,) = do(kernel, ("memory", {}), caller=owner)
    assert remembered(told) == [("project/local/ledger", "run", "add up what was spent")]


def test_reading_counts_and_a_run_makes_more_of_it(home: Path, kernel: Kernel, owner: Caller) -> None:
    read, ran = ("load", {"item_id": "parcel"}), run("parcel")
    *_, told = do(kernel, search("follow my parcel"), read, caller=owner), *do(kernel, ("memory", {}), caller=owner)
    assert remembered(told) == [("project/local/parcel", "load", "follow my parcel")]
    do(kernel, search("follow my parcels"), read, ran, caller=owner)
    (told,) = do(kernel, ("memory", {}), caller=owner)
    assert remembered(told) == [("project/local/parcel", "run", "follow my parcels")]


def test_what_was_not_shown_or_did_not_run_is_not_remembered(home: Path, kernel: Kernel, owner: Caller) -> None:
    do(kernel, search("will it rain"), run("ledger"), run("nowhere"), search("ledger"), run("ledger"), caller=owner)
    (told,) = do(kernel, ("memory", {}), caller=owner)
    assert told.content["remembered"] == []


def test_who_merely_looked_around_is_remembered_by_what_they_asked_for(
    home: Path, kernel: Kernel, owner: Caller
) -> None:
    do(kernel, search("whether it will rain"), search("*"), run("umbrella"), caller=owner)
    do(kernel, search("*"), run("ledger"), caller=owner)
    (told,) = do(kernel, ("memory", {}), caller=owner)
    assert [request for _, _, request in remembered(told)] == ["whether it will rain"]


def test_one_actor_learns_nothing_from_another(home: Path, kernel: Kernel) -> None:
    ana, ben = Caller(name="token:ana:1"), Caller(name="token:ben:2")
    do(kernel, search("a coat against rain"), run("umbrella"), caller=ana)
    theirs, listed = do(kernel, search("a coat, please"), ("memory", {}), caller=ben)
    assert names(theirs) == []
    assert listed.content["remembered"] == []
    mine, listed = do(kernel, search("a coat, please"), ("memory", {}), caller=ana)
    assert names(mine) == ["umbrella"]
    assert len(as_list(listed.content["remembered"])) == 1


def test_a_name_like_the_owners_is_not_the_owner(home: Path, project: Path, kernel: Kernel, owner: Caller) -> None:
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
    (told,) = do(kernel, ("memory", {}), caller=owner)
    assert [request for _, _, request in remembered(told)] == ["a coat against rain"]


def test_one_word_of_the_owner_switches_it_off(home: Path, kernel: Kernel, owner: Caller) -> None:
    do(kernel, search("a coat against rain"), run("umbrella"), caller=owner)
    (home / ".ai" / "registry.yaml").write_text("remember: false\n")
    off, _, _, listed = do(
        kernel, search("a coat, please"), search("rain or sun"), run("umbrella"), ("memory", {}), caller=owner
    )
    assert names(off) == []
    assert [request for _, _, request in remembered(listed)] == ["a coat against rain"]
    assert listed.content["is_on"] is False


def test_what_is_forgotten_has_no_effect(home: Path, kernel: Kernel, owner: Caller) -> None:
    do(kernel, search("a coat against rain"), run("umbrella"), search("parcel of rain"), run("parcel"), caller=owner)
    forgot, told = do(kernel, ("memory", {"action": "forget", "item": "umbrella"}), ("memory", {}), caller=owner)
    assert forgot.content["forgotten"] == 1
    assert [item for item, _, _ in remembered(told)] == ["project/local/parcel"]
    everything, again = do(kernel, ("memory", {"action": "forget"}), search("a coat, please"), caller=owner)
    assert everything.content["message"] == "1 remembered request forgotten"
    assert names(again) == []
    (unknown,) = do(kernel, ("memory", {"action": "forget", "item": "umbrella"}), caller=owner)
    assert unknown.content["code"] == "invalid_request"


def test_a_model_is_not_shown_what_the_owner_asked_for(home: Path, project: Path) -> None:
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
    (told,) = do(kernel, ("memory", {}), caller=owner)
    ((_, _, kept),) = remembered(told)
    assert kept.startswith("will it rain, ")
    for secret in ("walrus", "hunter2", "ghp_", "example.org", "4929", "9012"):
        assert secret not in kept
    database = (home / ".ai" / "state" / "registry.db").read_bytes()
    assert b"walrus" not in database


def test_a_search_counts_for_some_minutes_and_for_whoever_made_it() -> None:
    now = 0.0
    recent = Recent(clock=lambda: now)
    recent.asked(ANA, "will it rain", [("user/local/umbrella@1.0.0", 0.5)])
    assert recent.used(BEN, "user/local/umbrella@1.0.0", is_run=True) is None
    assert recent.used(ANA._replace(project="/other"), "user/local/umbrella@1.0.0", is_run=True) is None
    now = MINUTES * 60.0
    assert recent.used(ANA, "user/local/umbrella@2.0.0", is_run=True) == Wanted("will it rain")
    assert recent.used(ANA, "user/local/umbrella@2.0.0", is_run=True) is None
    now += 1
    recent.asked(ANA, "what was spent", [("user/local/ledger@1.0.0", 0.5)])
    now += MINUTES * 60.0 + 1
    assert recent.used(ANA, "user/local/ledger@1.0.0", is_run=False) is None


def test_a_long_request_is_cut_at_a_word_and_an_empty_one_is_not_kept() -> None:
    kept = kept_text("word " * 1_000, {})
    assert len(kept) <= LONGEST
    assert kept.endswith("word")
    assert kept_text(" … ? ", {}) == ""


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
def test_what_is_said_after_a_word_for_a_secret_is_not_kept(said: str, kept: str | None) -> None:
    assert kept_text(said, {}) == (said if kept is None else kept)


@pytest.mark.parametrize(
    ("request_", "part", "kept"),
    [
        ("look up the rain; write to me@example.org", "write to me@example.org", "write to …"),
        ("open it with password horse. Battery staple then", "Battery staple then", "open it with password …"),
        ("say blue. Walrus nine. Then look up the rain", "Walrus nine", "say [redacted:NOTE] Then look up the rain"),
        ("say blue. Walrus nine. Then look up the rain", "look up the rain", "look up the rain"),
    ],
)
def test_of_a_part_nothing_is_kept_that_is_not_of_the_whole(request_: str, part: str, kept: str) -> None:
    assert kept_of(Wanted(request_, part), {"NOTE": "blue. Walrus nine."}) == kept


@pytest.mark.parametrize("is_noted", [True, False])
def test_each_item_is_known_by_the_part_it_answers(tmp_path: Path, is_noted: bool) -> None:
    file = tmp_path / "searches.json" if is_noted else None
    recent, rain, spent = Recent(file), "user/local/umbrella@1.0.0", "user/local/ledger@1.0.0"
    recent.asked(ANA, "is there rain; ledger", [(rain, 0.5), (spent, 0.5)], {rain: "is there rain", spent: "ledger"})
    recent = Recent(file) if is_noted else recent
    assert recent.used(ANA, rain, is_run=True) == Wanted("is there rain; ledger", "is there rain")
    assert recent.used(ANA, spent, is_run=True) is None  # its own name


def test_whoever_looks_for_a_name_teaches_nothing() -> None:
    recent = Recent()
    recent.asked(ANA, "umbrella", [("user/local/umbrella@1.0.0", 1.0)])
    assert recent.used(ANA, "user/local/umbrella@1.0.0", is_run=True) is None


@pytest.mark.parametrize(
    ("place", "score", "is_found"), [(FIRST - 1, 0.1, True), (FIRST, 0.1, False), (FIRST, ENOUGH, True)]
)
def test_what_stood_far_down_and_matched_hardly_was_not_found_by_that(place: int, score: float, is_found: bool) -> None:
    recent = Recent()
    above = [(f"user/local/other{number}@1.0.0", 0.6) for number in range(place)]
    recent.asked(ANA, "all that is here", [*above, ("user/local/umbrella@1.0.0", score)])
    assert recent.used(ANA, "user/local/umbrella@1.0.0", is_run=True) == (
        Wanted("all that is here") if is_found else None
    )


def test_only_the_latest_search_that_showed_an_item_counts() -> None:
    recent, many = Recent(), [(f"user/local/other{number}@1.0.0", 0.6) for number in range(FIRST)]
    recent.asked(ANA, "will it rain", [("user/local/umbrella@1.0.0", 0.5)])
    recent.asked(ANA, "all that is here", [*many, ("user/local/umbrella@1.0.0", 0.1)])
    assert recent.used(ANA, "user/local/umbrella@1.0.0", is_run=True) is None
    recent.asked(ANA, "rain or sun", [("user/local/umbrella@1.0.0", 0.5)])
    assert recent.used(ANA, "user/local/umbrella@1.0.0", is_run=True) == Wanted("rain or sun")


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize(("others", "is_found"), [(BETWEEN, True), (BETWEEN + 1, False)])
def test_after_many_other_searches_nobody_knows_what_a_use_belongs_to(
    tmp_path: Path, others: int, is_found: bool, is_noted: bool
) -> None:
    file = tmp_path / "searches.json" if is_noted else None
    recent = Recent(file)
    recent.asked(ANA, "will it rain", [("user/local/umbrella@1.0.0", 0.5)])
    for need in [f"need {number // 2}" for number in range(2 * others)]:  # to ask again is no other search
        (Recent(file) if is_noted else recent).asked(ANA, need, [("user/local/ledger@1.0.0", 0.5)])
    found = (Recent(file) if is_noted else recent).used(ANA, "user/local/umbrella@1.0.0", is_run=True)
    assert found == (Wanted("will it rain") if is_found else None)


def test_settings_that_cannot_be_read_are_told_once_and_nothing_is_learnt(
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
    (told,) = do(kernel, ("memory", {}), caller=owner)
    assert told.content["remembered"] == []


def test_one_command_after_the_other_teaches_as_well(home: Path, project: Path, owner: Caller) -> None:
    def command(*request: tuple[str, JsonObject]) -> list[Answer]:
        return do(Kernel(project, surface="cli"), *request, caller=owner)

    command(search("a coat against rain, password: hunter2"))
    noted = home / ".cache" / "kiwi" / "searches.json"
    assert "hunter2" not in noted.read_text()
    assert noted.stat().st_mode & 0o777 == 0o600
    command(run("umbrella"))
    (told,) = command(("memory", {}))
    assert [item for item, _, _ in remembered(told)] == ["project/local/umbrella"]
    command(("memory", {"action": "forget"}))
    assert not noted.exists()


@pytest.mark.parametrize(
    "said", ["", "[]", "{", '{"who": 1}', '{"who": ["ana", "editor", "/work"], "searches": [1, {}]}']
)
def test_a_note_that_makes_no_sense_says_nothing(tmp_path: Path, said: str) -> None:
    (tmp_path / "searches.json").write_text(said)
    assert Recent(tmp_path / "searches.json").used(ANA, "user/local/umbrella", is_run=True) is None


def test_what_is_forgotten_of_one_item_leaves_what_is_not_written_yet_of_another(home: Path, project: Path) -> None:
    space, store = Space(project, home / ".ai", home / ".cache"), Slow(home / ".ai")
    store.registry()
    memories = Memories(store)
    memories.note("", "user/local/ledger@1.0.0", Wanted("what was spent"), space, is_run=True)
    assert store.is_asked.wait(20)
    memories.note("", "user/local/umbrella@1.0.0", Wanted("will it rain"), space, is_run=True)
    memories.note("", "user/local/parcel@1.0.0", Wanted("where is it"), space, is_run=True)
    memories.forget("", ["user/local/umbrella"])
    store.may_go_on.set()
    assert memories.settle(20)
    assert {trace.item for trace in memories.listed("")} == {"user/local/ledger", "user/local/parcel"}
    memories.close()
    store.close()


def test_what_a_request_means_is_found_out_once_and_in_the_background(home: Path, project: Path) -> None:
    space, store, asked = Space(project, home / ".ai", home / ".cache"), Store(home / ".ai"), Letters()
    memories = Memories(store, lambda: asked, asked.name)
    need = read_request("a coat against rain", asked)
    assert memories.recall("", space, need) is None
    asked.texts.clear()
    for number in range(20):
        memories.note(
            "",
            "user/local/umbrella@1.0.0",
            Wanted(f"rain{chr(97 + number)} coat{chr(97 + number)}"),
            space,
            is_run=True,
        )
    assert memories.settle(20)
    known = memories.listed("")
    assert {trace.encoder for trace in known} == {"letters"}
    assert sorted(asked.texts) == sorted(trace.request for trace in known)
    recall = memories.recall("", space, need)
    assert recall is not None
    assert recall.found == ["user/local/umbrella"]
    memories.close()
    again = Memories(store, lambda: asked, asked.name)
    asked.texts.clear()
    again.recall("", space, need)
    assert again.settle(20)
    assert again.recall("", space, need) == recall
    assert asked.texts == []
    again.close()
    store.close()


def test_what_a_request_means_is_found_out_again_where_it_was_damaged(home: Path, project: Path) -> None:
    space, store, asked = Space(project, home / ".ai", home / ".cache"), Store(home / ".ai"), Letters()
    memories = Memories(store, lambda: asked, asked.name)
    memories.note("", "user/local/umbrella@1.0.0", Wanted("a coat against rain"), space, is_run=True)
    need = read_request("a coat against rain", asked)
    memories.recall("", space, need)
    assert memories.settle(20)
    memories.close()
    with store.registry().database.transaction() as transaction:
        transaction.write("update remembered set vector = ?", (b"short",))

    again = Memories(store, lambda: asked, asked.name)
    again.recall("", space, need)
    assert again.settle(20)
    (trace,) = again.listed("")
    assert (trace.encoder, len(trace.vector)) == ("letters", SIZE)
    again.close()
    store.close()
