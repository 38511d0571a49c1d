"""Every call that runs or changes something has one receipt without secrets."""

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

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.records import Receipt
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.recorder import action_of, names_secret
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.kernel.verbs import find_verb
from kiwi_mcp.manifest.signatures import canonical
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


def fields_of(receipt: Mapping[str, object], *words: str) -> tuple[object, ...]:
    return tuple(receipt[word] for word in words)


def level(home: Path, word: str) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "registry.yaml").write_text(f"actor: ana\naudit: {word}\n")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("N8")
@pytest.mark.parametrize("word", ["minimal", "standard", "verbose"])
def test_every_call_has_one_receipt_at_each_level(
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
    assert [fields_of(one, "status", "code") for one in kept] == [(status, code) for _, status, code in calls]
    assert {one["level"] for one in kept} == {word}
    assert ask("audit", action="verify").content["status"] == "verified"


@pytest.mark.req("E7")
def test_search_and_load_are_recorded_like_any_call(ask: Ask, make: Callable[..., None], receipts: Read) -> None:
    make()
    assert ask("search", query="say it").content["total"] == 1
    ask("load", item_id="say")
    ask("load", item_id="nothing")
    ask("search", query="say it", limit=0)
    kept = receipts()
    assert [fields_of(one, "action", "item", "status", "code", "verdict") for one in kept] == [
        ("search", "", "success", "", "allow"),
        ("load", "say", "success", "", "allow"),
        ("load", "nothing", "refused", "tool_not_found", ""),
        ("search", "", "refused", "invalid_request", ""),
    ]
    assert kept[0]["arguments_sha256"] == sha256(canonical({"query": "say it"})).hexdigest()
    assert "say it" not in json.dumps(kept)  # a query is private and may contain anything
    assert ask("audit", action="verify").content["status"] == "verified"


@pytest.mark.usefixtures("sandbox")
def test_listing_verbs_leave_no_receipt(ask: Ask, make: Callable[..., None], receipts: Read) -> None:
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
        ("load", {"item_id": "x"}, "load"),
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
def test_every_changing_verb_is_recorded(verb: str, request_: JsonObject, action: str) -> None:
    assert action_of(verb, find_verb(verb, request_), request_) == action


@pytest.mark.usefixtures("sandbox")
def test_a_receipt_contains_actor_action_plan_and_outcome(
    ask: Ask, make: Callable[..., None], receipts: Read, home: Path
) -> None:
    level(home, "standard")
    make("echo done\n")
    answer = ask("execute", item_id="say", parameters={"word": "hi"}).content
    (one,) = receipts()
    assert fields_of(one, "seq", "actor", "surface", "action", "item") == (1, "ana", "python", "run", "say")
    assert fields_of(one, "id", "identity", "verdict", "status") == (
        answer["run_id"],
        answer["identity"],
        "allow",
        "success",
    )
    assert one["arguments_sha256"] == sha256(canonical({"word": "hi"})).hexdigest()
    assert one["outcome_sha256"] == sha256(b"done").hexdigest()
    run = ask("runs", action="show", run_id=str(one["id"])).content
    assert fields_of(one, "digest", "plan_digest") == (run["digest"], run["plan_digest"])


@pytest.mark.usefixtures("sandbox")
def test_equal_arguments_and_outcomes_have_equal_hashes(ask: Ask, make: Callable[..., None], receipts: Read) -> None:
    make("echo done\n")
    for word in ("a", "a", "b"):
        ask("execute", item_id="say", parameters={"word": word})
    first, second, third = receipts()
    assert fields_of(first, "arguments_sha256", "outcome_sha256") == fields_of(
        second, "arguments_sha256", "outcome_sha256"
    )
    assert first["arguments_sha256"] != third["arguments_sha256"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("N8")
@pytest.mark.parametrize("word", ["minimal", "standard", "verbose"])
def test_a_receipt_contains_no_secret(
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


@pytest.mark.usefixtures("sandbox")
def test_the_full_audit_level_records_arguments(
    ask: Ask, make: Callable[..., None], receipts: Read, home: Path
) -> None:
    level(home, "verbose")
    make("echo done\n")
    ask("execute", item_id="say", parameters={"word": "hi"})
    ask("execute", item_id="say", parameters={"word": "x" * 10_000})
    short, long = (json.loads(str(one["detail"])) for one in receipts())
    assert short["arguments"] == {"word": "hi"}
    assert long["arguments"] == "not kept: they are too long"


def test_a_denied_call_is_recorded_as_denied(ask: Ask, make: Callable[..., None], receipts: Read, home: Path) -> None:
    make()
    (home / ".ai").mkdir()
    (home / ".ai" / "policy.yaml").write_text("items: {deny: ['*say*']}\n")
    assert ask("execute", item_id="say").content["code"] == "not_permitted"
    (one,) = receipts()
    assert fields_of(one, "status", "code", "verdict") == ("refused", "not_permitted", "deny")


def test_a_refused_call_of_a_model_is_recorded(project: Path, receipts: Read) -> None:
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
    assert [fields_of(one, "surface", "action", "item", "status", "verdict") for one in receipts()] == [
        ("mcp", "registry add", "evil", "refused", "deny"),
        ("mcp", "mcp accept", "evil", "refused", "deny"),
    ]


@pytest.mark.usefixtures("sandbox")
def test_a_call_is_recorded_under_its_caller(project: Path, make: Callable[..., None], receipts: Read) -> None:
    make()

    async def visit() -> None:
        kernel = Kernel(project)
        await kernel.call("execute", {"item_id": "say"}, Caller(name="eve"))
        await kernel.call("execute", {"item_id": "say", "action": "sign"}, Caller(name="eve"))
        await kernel.aclose()

    asyncio.run(visit())
    assert [one["actor"] for one in receipts()] == ["eve", "eve"]


@pytest.mark.usefixtures("sandbox")
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
    assert fields_of(one, "status", "code") == ("cancelled", "cancelled")


@pytest.mark.usefixtures("sandbox")
def test_concurrent_calls_form_one_valid_chain(
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
def test_a_search_is_recorded_during_another_write(
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
            assert await asyncio.to_thread(waits.wait, 30)  # the loop continues while the receipt waits
            assert not call.done()
        assert not (await call).is_error
        other.close()
        await kernel.aclose()

    asyncio.run(search())
    assert [fields_of(one, "action", "status") for one in receipts()] == [("search", "success")] * 2


@pytest.mark.req("E7")
def test_a_search_after_the_store_was_removed_starts_a_new_store(
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
def test_a_secret_key_is_recognised_at_any_depth(parts: list[str]) -> None:
    words = "passw|passphrase|secret|token|api[_-]?key|credential|authorization|private[_-]?key|cookie"
    text = "".join(parts)
    assert names_secret(text.encode()) == bool(re.search(rf'(?i)(?:{words})[^"]{{0,60}}":', text))


def test_an_unusable_store_is_reported_and_hides_no_answer(ask: Ask, make: Callable[..., None], home: Path) -> None:
    make("echo done\n")
    break_store(home)
    done = ask("init").content
    assert "error" not in done
    (warning,) = [str(one) for one in as_list(done["warnings"]) if "receipt" in str(one)]
    assert warning.startswith("It was done, and no receipt of it was written: ")


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("execute", {"action": "sign", "item_id": "say"}),
        ("key", {"action": "new"}),
        ("key", {"action": "rotate"}),
        ("relax", {"action": "apply", "item_id": "say", "to": "standard"}),
        ("migrate", {"apply": True, "sign": True}),
        ("execute", {"action": "delete", "item_id": "say", "parameters": {"confirm": True}}),
    ],
)
def test_nothing_is_trusted_or_deleted_without_a_receipt(
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
    """Change the store as an attacker with access to the file can."""

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
def three(ask: Ask, make: Callable[..., None], sandbox: None) -> None:
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
def test_edited_removed_and_truncated_receipts_are_detected(
    ask: Ask, tamper: Callable[[str], None], statement: str, place: str
) -> None:
    tamper(statement)
    answer = ask("audit", action="verify")
    assert answer.exit_code == 5
    assert answer.content["status"] == "damaged"
    assert [as_object(issue)["place"] for issue in as_list(answer.content["issues"])] == [place]


@pytest.mark.usefixtures("three")
@pytest.mark.case("DB-08")
def test_later_calls_do_not_hide_a_truncation(ask: Ask, tamper: Callable[[str], None], home: Path) -> None:
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
def test_a_stored_end_written_by_another_is_ignored(ask: Ask, home: Path, spoil: Callable[[str], str]) -> None:
    path = home / ".ai" / "state" / "audit.head"
    path.write_text(spoil(path.read_text()))
    spoilt = path.read_bytes()
    ask("execute", item_id="say")
    assert path.read_bytes() == spoilt  # what might be proof is left for the owner to see
    answer = ask("audit", action="verify").content
    assert [as_object(issue)["place"] for issue in as_list(answer["issues"])] == ["the end of the chain"]


@pytest.mark.usefixtures("three")
def test_a_missing_end_is_reported(ask: Ask, home: Path) -> None:
    (home / ".ai" / "state" / "audit.head").unlink()
    assert ask("audit", action="verify").content["status"] == "damaged"


@pytest.mark.usefixtures("three")
def test_the_stored_end_and_its_key_are_private(home: Path) -> None:
    state = home / ".ai" / "state"
    assert {(state / name).stat().st_mode & 0o777 for name in ("audit.head", "audit.key")} == {0o600}


def appears(path: Path) -> None:
    """Wait until there is a file, for some seconds."""
    for _ in range(900):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(path)


@pytest.mark.usefixtures("sandbox")
async def test_the_end_is_stored_while_a_server_is_idle(
    project: Path, home: Path, make: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.kernel.recorder._PERIOD", 0.01)
    make("echo done\n")

    kernel = Kernel(project)
    await kernel.call("execute", {"item_id": "say"})
    kept = home / ".ai" / "state" / "audit.head"
    async with asyncio.timeout(120):
        await asyncio.to_thread(appears, kept)
    await kernel.aclose()


@pytest.mark.usefixtures("three")
def test_receipts_are_filtered(ask: Ask) -> None:
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
