"""Every call that runs or changes something leaves one receipt, and nothing secret is in it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Event

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.receipt import Receipt
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.kernel.witness import changes, names_secret
from kiwi_mcp.manifest.digest import canonical
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.receipts import Receipts

TOOL = """tool_id: {name}
tool_type: script
version: 1.0.0
executor: bash_runtime
config: {{entrypoint: main.sh, timeout: 20, env: {{SERVICE_KEY: "${{SERVICE_KEY:-}}"}}}}
parameters: [{{name: word, type: string}}, {{name: password, type: string}}]
"""
CANARY = "canary-41fe-secret-value"
Ask = Callable[..., Answer]


@pytest.fixture
def make(project: Path) -> Callable[..., None]:
    """Write a bash tool."""

    def write(text: str = 'echo "$SERVICE_KEY"\n', name: str = "say") -> None:
        folder = project / ".ai" / "tools" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tool.yaml").write_text(TOOL.format(name=name))
        (folder / "main.sh").write_text(text)

    return write


@pytest.fixture
def receipts(ask: Ask) -> Callable[[], list[Mapping[str, object]]]:
    """All receipts there are, the oldest first, each whole."""

    def read() -> list[Mapping[str, object]]:
        return [dict(as_object(one)) for one in as_list(ask("audit", action="export").content["receipts"])]

    return read


Read = Callable[[], list[Mapping[str, object]]]


def told(receipt: Mapping[str, object], *words: str) -> tuple[object, ...]:
    return tuple(receipt[word] for word in words)


def level(home: Path, word: str) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "registry.yaml").write_text(f"actor: ana\naudit: {word}\n")


@pytest.mark.req("N8")
@pytest.mark.parametrize("word", ["minimal", "standard", "verbose"])
def test_there_is_one_receipt_for_every_call_at_each_level(
    ask: Ask, make: Callable[..., None], receipts: Read, home: Path, word: str
) -> None:
    level(home, word)
    make()
    make("exit 3\n", "fails")
    calls: list[tuple[JsonObject, str, str]] = [
        ({"item_id": "say", "parameters": {"word": "hi"}}, "success", ""),
        ({"item_id": "fails"}, "error", "execution_failed"),
        ({"item_id": "nothing"}, "refused", "tool_not_found"),
        ({"item_id": "say", "parameters": {"wrong": 1}}, "refused", "invalid_input"),
        ({"item_id": "say", "parameters": 7}, "refused", "invalid_request"),
        ({}, "refused", "invalid_request"),
        ({"item_id": "say", "project_path": "/nowhere/at/all"}, "refused", "project_path_invalid"),
        ({"item_id": "say", "action": "fly"}, "refused", "invalid_request"),
        ({"item_id": "say", "action": "sign"}, "success", ""),
        ({"item_id": "say", "action": "delete"}, "success", ""),
    ]
    for request, _, _ in calls:
        ask("execute", **request)
    kept = receipts()
    assert [told(one, "status", "code") for one in kept] == [(status, code) for _, status, code in calls]
    assert {one["level"] for one in kept} == {word}
    assert ask("audit", action="verify").content["status"] == "verified"


@pytest.mark.req("E7")
def test_what_is_searched_for_and_loaded_is_written_down_like_any_call(
    ask: Ask, make: Callable[..., None], receipts: Read
) -> None:
    make()
    assert ask("search", query="say it").content["total"] == 1
    ask("load", item_id="say")
    ask("load", item_id="nothing")
    ask("search", query="say it", limit=0)
    kept = receipts()
    assert [told(one, "action", "item", "status", "code", "verdict") for one in kept] == [
        ("search", "", "success", "", "allow"),
        ("load", "say", "success", "", "allow"),
        ("load", "nothing", "refused", "tool_not_found", ""),
        ("search", "", "refused", "invalid_request", ""),
    ]
    assert kept[0]["arguments_sha256"] == sha256(canonical({"query": "say it"})).hexdigest()
    assert "say it" not in json.dumps(kept)  # what somebody looks for is theirs, and may hold anything
    assert ask("audit", action="verify").content["status"] == "verified"


def test_what_only_looks_leaves_none(ask: Ask, make: Callable[..., None], receipts: Read) -> None:
    make()
    ask("execute", item_id="say", dry_run=True)
    ask("execute", item_id="say", action="sign", dry_run=True)
    for action in ("why", "validate"):
        ask("execute", item_id="say", action=action)
    for verb in ("runs", "doctor", "help", "registry", "mcp", "prefer", "audit", "nonsense"):
        ask(verb)
    assert receipts() == []


@pytest.mark.parametrize(
    ("verb", "request_", "action"),
    [
        ("execute", {}, "run"),
        ("execute", {"action": "publish"}, "publish"),
        ("execute", {"action": ["run"]}, "execute"),
        ("execute", {"action": "versions"}, ""),
        ("load", {"item_id": "x"}, ""),
        ("load", {"item_id": "x", "destination": "user"}, "copy"),
        ("init", {}, "init"),
        ("migrate", {}, ""),
        ("migrate", {"apply": True}, "migrate"),
        ("registry", {"action": "push"}, "registry push"),
        ("mcp", {"action": "accept"}, "mcp accept"),
        ("mcp", {"action": "add", "dry_run": True}, ""),
        ("mcp", {"action": "new words\n"}, "mcp"),
        ("prefer", {"action": "add"}, "prefer add"),
        ("runs", {"action": "prune"}, "runs prune"),
        ("tasks", {"action": "cancel"}, "tasks cancel"),
        ("audit", {"action": "export"}, ""),
        ("nonsense", {"action": "add"}, ""),
    ],
)
def test_every_verb_that_changes_something_is_written_down(verb: str, request_: JsonObject, action: str) -> None:
    assert changes(verb, request_) == action


def test_a_receipt_tells_who_what_by_which_plan_and_with_what_outcome(
    ask: Ask, make: Callable[..., None], receipts: Read, home: Path
) -> None:
    level(home, "standard")
    make("echo done\n")
    answer = ask("execute", item_id="say", parameters={"word": "hi"}).content
    (one,) = receipts()
    assert told(one, "seq", "actor", "surface", "action", "item") == (1, "ana", "python", "run", "say")
    assert told(one, "id", "identity", "verdict", "status") == (
        answer["run_id"],
        answer["identity"],
        "allow",
        "success",
    )
    assert one["arguments_sha256"] == sha256(canonical({"word": "hi"})).hexdigest()
    assert one["outcome_sha256"] == sha256(b"done").hexdigest()
    run = ask("runs", action="show", run_id=str(one["id"])).content
    assert told(one, "digest", "plan_digest") == (run["digest"], run["plan_digest"])


def test_the_same_arguments_and_outcome_have_the_same_hashes(
    ask: Ask, make: Callable[..., None], receipts: Read
) -> None:
    make("echo done\n")
    for word in ("a", "a", "b"):
        ask("execute", item_id="say", parameters={"word": word})
    first, second, third = receipts()
    assert told(first, "arguments_sha256", "outcome_sha256") == told(second, "arguments_sha256", "outcome_sha256")
    assert first["arguments_sha256"] != third["arguments_sha256"]


@pytest.mark.req("N8")
@pytest.mark.parametrize("word", ["minimal", "standard", "verbose"])
def test_nothing_secret_is_in_a_receipt(
    ask: Ask,
    make: Callable[..., None],
    receipts: Read,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
) -> None:
    level(home, word)
    monkeypatch.setenv("SERVICE_KEY", CANARY)
    make()
    ask("execute", item_id="say", parameters={"word": CANARY})
    ask("execute", item_id="say", parameters={"password": "hunter22"})
    ask("execute", item_id="say", parameters={"word": json.dumps({"api_key": "hunter22"})})
    ask("execute", item_id="say", parameters={"word": f"nothing {CANARY}", "wrong": CANARY})
    ask("registry", action="push", remote=f"postgresql://ana:{CANARY}@127.0.0.1:1/x")
    ask("mcp", action="add", server="thing", command="true", env={"TOKEN": CANARY}, start=False)
    kept = receipts()
    assert len(kept) == 6
    for shown in (CANARY, CANARY[::-1], "hunter22"):
        assert shown not in json.dumps(kept)
    # A hash of something short could be tried out, so there is none where a secret may be among the arguments.
    assert {one["arguments_sha256"] for one in kept} == {""}


def test_the_owner_who_wants_more_gets_the_arguments(
    ask: Ask, make: Callable[..., None], receipts: Read, home: Path
) -> None:
    level(home, "verbose")
    make("echo done\n")
    ask("execute", item_id="say", parameters={"word": "hi"})
    ask("execute", item_id="say", parameters={"word": "x" * 10_000})
    short, long = (json.loads(str(one["detail"])) for one in receipts())
    assert short["arguments"] == {"word": "hi"}
    assert long["arguments"] == "not kept: they are too long"


def test_a_denied_call_says_so(ask: Ask, make: Callable[..., None], receipts: Read, home: Path) -> None:
    make()
    (home / ".ai").mkdir()
    (home / ".ai" / "policy.yaml").write_text("items: {deny: ['*say*']}\n")
    assert ask("execute", item_id="say").content["code"] == "not_permitted"
    (one,) = receipts()
    assert told(one, "status", "code", "verdict") == ("refused", "not_permitted", "deny")


def test_what_a_model_may_not_do_is_refused_and_written_down(project: Path, receipts: Read) -> None:
    async def model() -> list[Answer]:
        kernel = Kernel(project, is_owner=False, surface="mcp")
        try:
            return [
                await kernel.call("registry", {"action": "add", "remote": "evil", "url": "https://evil.test"}),
                await kernel.call("mcp", {"action": "accept", "server": "evil"}),
                await kernel.call("audit", {"action": "list"}),
            ]
        finally:
            await kernel.aclose()

    assert [answer.content["code"] for answer in asyncio.run(model())] == ["not_permitted"] * 3
    assert [told(one, "surface", "action", "item", "status", "verdict") for one in receipts()] == [
        ("mcp", "registry add", "evil", "refused", "deny"),
        ("mcp", "mcp accept", "evil", "refused", "deny"),
    ]


def test_a_call_is_made_in_the_name_of_whoever_makes_it(
    project: Path, make: Callable[..., None], receipts: Read
) -> None:
    make()

    async def visit() -> None:
        kernel = Kernel(project)
        await kernel.call("execute", {"item_id": "say"}, Caller(name="eve"))
        await kernel.call("execute", {"item_id": "say", "action": "sign"}, Caller(name="eve"))
        await kernel.aclose()

    asyncio.run(visit())
    assert [one["actor"] for one in receipts()] == ["eve", "eve"]


def test_a_cancelled_call_leaves_a_receipt(project: Path, make: Callable[..., None], receipts: Read, ask: Ask) -> None:
    make(f"touch '{project}/begun'; sleep 20\n")
    assert not ask("execute", action="sign", item_id="say").is_error
    assert not ask("relax", action="apply", item_id="say", to="trusted").is_error

    async def cancel() -> None:
        kernel = Kernel(project)
        call = asyncio.create_task(kernel.call("execute", {"item_id": "say"}))
        await asyncio.to_thread(appears, project / "begun")
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        await kernel.aclose()

    asyncio.run(cancel())
    *_, one = receipts()
    assert told(one, "status", "code") == ("cancelled", "cancelled")


def test_calls_at_once_are_all_in_one_sound_chain(
    project: Path, make: Callable[..., None], receipts: Read, ask: Ask
) -> None:
    make("echo done\n")

    async def many() -> None:
        kernel = Kernel(project)
        await asyncio.gather(*[kernel.call("execute", {"item_id": "say"}) for _ in range(16)])
        await kernel.aclose()

    asyncio.run(many())
    assert len(receipts()) == 16
    assert ask("audit", action="verify").content["status"] == "verified"


@pytest.mark.req("E7")
def test_a_search_leaves_its_receipt_also_while_somebody_else_writes(
    project: Path, make: Callable[..., None], receipts: Read, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    waits, add = Event(), Receipts.add

    def added(self: Receipts, receipt: Receipt) -> None:
        waits.set()
        add(self, receipt)

    monkeypatch.setattr(Receipts, "add", added)

    async def search() -> None:
        kernel = Kernel(project)
        await kernel.call("search", {"query": "first"})
        other = open_database(default_url(home / ".ai"))
        with other.transaction():
            call = asyncio.create_task(kernel.call("search", {"query": "second"}))
            assert await asyncio.to_thread(waits.wait, 30)  # the loop goes on while the receipt waits
            assert not call.done()
        assert not (await call).is_error
        other.close()
        await kernel.aclose()

    asyncio.run(search())
    assert [told(one, "action", "status") for one in receipts()] == [("search", "success")] * 2


@pytest.mark.req("E7")
def test_a_search_into_a_store_that_was_removed_begins_a_new_one(
    project: Path, make: Callable[..., None], receipts: Read, home: Path
) -> None:
    make()

    async def search() -> None:
        kernel = Kernel(project)
        await kernel.call("search", {"query": "first"})
        for file in (home / ".ai" / "state").glob("registry.db*"):
            file.unlink()
        assert not (await kernel.call("search", {"query": "second"})).is_error
        await kernel.aclose()

    asyncio.run(search())
    assert len(receipts()) == 1


@given(st.lists(st.sampled_from(['"', ":", '":', "token", "Api-Key", "a", " " * 30, "\n", "passwords", "cookie", "{"])))
@example(["token", " " * 30, " " * 30, '":'])
@example(["token", " " * 30, " " * 30, "a", '":'])
def test_a_key_that_names_a_secret_is_seen_wherever_it_stands(parts: list[str]) -> None:
    words = "passw|passphrase|secret|token|api[_-]?key|credential|authorization|private[_-]?key|cookie"
    text = "".join(parts)
    assert names_secret(text.encode()) == bool(re.search(rf'(?i)(?:{words})[^"]{{0,60}}":', text))


def test_a_store_that_cannot_be_used_is_told_and_hides_no_answer(
    ask: Ask, make: Callable[..., None], home: Path
) -> None:
    make("echo done\n")
    break_store(home)
    removed = ask("execute", item_id="say", action="delete", parameters={"confirm": True}).content
    assert "error" not in removed
    (warning,) = [str(one) for one in as_list(removed["warnings"]) if "receipt" in str(one)]
    assert warning.startswith("It was done, and no receipt of it was written: ")


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("execute", {"action": "sign", "item_id": "say"}),
        ("key", {"action": "new"}),
        ("key", {"action": "rotate"}),
        ("relax", {"action": "apply", "item_id": "say", "to": "standard"}),
        ("migrate", {"apply": True, "sign": True}),
    ],
)
def test_nothing_is_trusted_without_a_receipt(
    ask: Ask, make: Callable[..., None], home: Path, project: Path, verb: str, words: JsonObject
) -> None:
    make("echo done\n")
    break_store(home)
    before = files_below(project, home)
    refused = ask(verb, **words).content
    assert refused["code"] == "store_damaged", refused
    assert files_below(project, home) == before


def test_a_key_is_revoked_also_where_no_receipt_can_be_written(ask: Ask, home: Path) -> None:
    made = as_object(ask("key", action="new").content["key"])
    break_store(home)
    revoked = ask("key", action="revoke", key=made["fingerprint"]).content
    assert "error" not in revoked, revoked
    assert any("It was done, and no receipt" in str(one) for one in as_list(revoked["warnings"]))


def break_store(home: Path) -> None:
    """Leave something in the place of the store that is none."""
    place = Path(default_url(home / ".ai").removeprefix("sqlite://"))
    place.parent.mkdir(parents=True, exist_ok=True)
    for left in place.parent.glob(f"{place.name}*"):
        left.unlink()
    place.write_bytes(b"not a database at all" * 100)


def files_below(*folders: Path) -> dict[Path, bytes]:
    """Return the files below some folders, but what is derived."""
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path: path.read_bytes() for path in found}


@pytest.fixture
def tamper(home: Path) -> Callable[[str], None]:
    """Do to the store what somebody with the file in their hands can do."""

    def do(statement: str) -> None:
        database = open_database(default_url(home / ".ai"))
        with database.transaction() as transaction:
            transaction.run_script(
                "drop trigger if exists receipts_never_change; drop trigger if exists receipts_stay;"
            )
            transaction.write(statement)
        database.close()

    return do


@pytest.fixture
def three(ask: Ask, make: Callable[..., None]) -> None:
    """Three calls that were made."""
    make("echo done\n")
    for _ in range(3):
        ask("execute", item_id="say")


@pytest.mark.usefixtures("three")
@pytest.mark.case("DB-08")
@pytest.mark.parametrize(
    ("statement", "place"),
    [
        ("update receipts set status = 'refused' where seq = 2", "receipt 2"),
        ("delete from receipts where seq = 2", "receipt 2"),
        ("delete from receipts where seq = 3", "the end of the chain"),
        ("delete from receipts", "the end of the chain"),
    ],
)
def test_an_edited_a_removed_and_a_cut_off_receipt_are_found(
    ask: Ask, tamper: Callable[[str], None], statement: str, place: str
) -> None:
    tamper(statement)
    answer = ask("audit", action="verify")
    assert answer.exit_code == 5
    assert answer.content["status"] == "damaged"
    assert [as_object(issue)["place"] for issue in as_list(answer.content["issues"])] == [place]


@pytest.mark.usefixtures("three")
@pytest.mark.case("DB-08")
def test_calls_that_follow_do_not_cover_up_a_cut_end(ask: Ask, tamper: Callable[[str], None], home: Path) -> None:
    tamper("delete from receipts where seq > 1")
    for _ in range(4):
        ask("execute", item_id="say")
    answer = ask("audit", action="verify").content
    assert [as_object(issue)["place"] for issue in as_list(answer["issues"])] == ["the end of the chain"]
    (home / ".ai" / "state" / "audit.head").unlink()  # the owner looked, and begins anew
    ask("execute", item_id="say")
    assert ask("audit", action="verify").content["status"] == "verified"


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace('"count": 3', '"count": 1'),
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: '{"stores": 3, "mac": []}',
    ],
)
def test_a_kept_end_that_somebody_else_wrote_counts_for_nothing(
    ask: Ask, home: Path, spoil: Callable[[str], str]
) -> None:
    path = home / ".ai" / "state" / "audit.head"
    path.write_text(spoil(path.read_text()))
    spoilt = path.read_bytes()
    ask("execute", item_id="say")
    assert path.read_bytes() == spoilt  # what might be proof is left for the owner to see
    answer = ask("audit", action="verify").content
    assert [as_object(issue)["place"] for issue in as_list(answer["issues"])] == ["the end of the chain"]


@pytest.mark.usefixtures("three")
def test_a_missing_end_is_told(ask: Ask, home: Path) -> None:
    (home / ".ai" / "state" / "audit.head").unlink()
    assert ask("audit", action="verify").content["status"] == "damaged"


@pytest.mark.usefixtures("three")
def test_the_end_and_its_key_are_for_the_owner_alone(home: Path) -> None:
    state = home / ".ai" / "state"
    assert {(state / name).stat().st_mode & 0o777 for name in ("audit.head", "audit.key")} == {0o600}


def appears(path: Path) -> None:
    """Wait until there is a file, for some seconds."""
    for _ in range(900):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(path)


def test_the_end_is_kept_while_a_server_idles(
    project: Path, home: Path, make: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.kernel.anchor._PERIOD", 0.01)
    make("echo done\n")

    async def serve() -> None:
        kernel = Kernel(project)
        await kernel.call("execute", {"item_id": "say"})
        kept = home / ".ai" / "state" / "audit.head"
        async with asyncio.timeout(10):
            await asyncio.to_thread(appears, kept)
        await kernel.aclose()

    asyncio.run(serve())


@pytest.mark.usefixtures("three")
def test_receipts_are_listed_by_what_is_asked(ask: Ask) -> None:
    ask("execute", item_id="gone")
    answer = ask("audit", limit=2).content
    assert [as_object(one)["seq"] for one in as_list(answer["receipts"])] == [4, 3]
    assert answer["next"] == 3
    assert [as_object(one)["seq"] for one in as_list(ask("audit", before=3).content["receipts"])] == [2, 1]
    assert len(as_list(ask("audit", tool="project/local/say", since="1h").content["receipts"])) == 3
    assert len(as_list(ask("audit", status="refused").content["receipts"])) == 1
    assert ask("audit", did="sign").content["receipts"] == []
    assert ask("audit", actor="nobody").content["receipts"] == []
    assert ask("audit", since="yesterday").content["code"] == "invalid_request"
    assert ask("audit", action="show", receipt="4").content["code"] == "tool_not_found"
    assert ask("audit", action="show").content["code"] == "invalid_request"
    assert ask("audit", action="show", receipt="nothing").content["code"] == "not_found"


def test_settings_that_name_another_level_are_refused(ask: Ask, home: Path) -> None:
    level(home, "everything")
    answer = ask("audit").content
    assert answer["code"] == "invalid_manifest"
    assert "minimal, standard, verbose" in json.dumps(answer)
