"""Every call leaves a run record: with any outcome, without parameters or secrets, and with its result once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import NO_CALLER, Call, Space
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, RunNotFound, StoreUnavailable
from kiwi_mcp.domain.grants import Grant, Rights, Rules
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.domain.times import run_id
from kiwi_mcp.drivers.process import create_driver
from kiwi_mcp.kernel import pipeline
from kiwi_mcp.kernel.context import Context, Services
from kiwi_mcp.kernel.mcp_servers import check_server
from kiwi_mcp.kernel.recorder import Run
from kiwi_mcp.kernel.verb import parse
from kiwi_mcp.kernel.verbs.runs import RunShowRequest, RunsListRequest, listed, pruned, shown
from kiwi_mcp.policy.isolation import IsolationDecision, decide_isolation
from kiwi_mcp.policy.policy_files import OwnerAuthority
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.outputs import INLINE_LIMIT, PREVIEW, read_page, read_record
from kiwi_mcp.store.runs import RunFilter, RunRetention, Runs

TOOL = """tool_id: {name}
tool_type: script
version: 1.0.0
executor: bash_runtime
config: {{entrypoint: main.sh, timeout: {timeout}, env: {{SERVICE_KEY: "${{SERVICE_KEY:-}}"}}}}
parameters: [{{name: word, type: string}}]
"""
DIRECTIVE = """# Greet

```xml
<directive name="greet" version="1.0.0">
  <metadata><description>Greet a person</description><model tier="fast" /><permissions /></metadata>
  <process><step name="say"><description>Say it</description><action>Say hello.</action></step></process>
</directive>
```
"""
LARGE = "head -c 100000 /dev/zero | tr '\\0' 'k'\n"
CANARY = "canary-77ab-secret-value"

Make = Callable[..., Call]


@pytest.fixture
def runs(database: Database) -> Runs:
    return Runs(database)


@pytest.fixture
def make(project: Path, home: Path) -> Make:
    """Write a bash tool, and return a call of it."""

    def write(text: str, name: str = "say", timeout: float = 60, **parameters: Json) -> Call:
        folder = project / ".ai" / "tools" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tool.yaml").write_text(TOOL.format(name=name, timeout=timeout))
        (folder / "main.sh").write_text(text)
        return Call(name, Space(project, home / ".ai", home / ".cache"), parameters)

    return write


async def run(call: Call, runs: Runs | KiwiError, rights: Rights = Rights()) -> Run:  # noqa: B008 - it is frozen
    space = call.space
    services = Services(
        space.project,
        space.user,
        space.cache,
        OwnerAuthority(space.user),
        is_owner=True,
        surface="cli",
        check_server=check_server,
        dispatch=AsyncMock(),
    )
    services.provenance.held = trusting  # type: ignore[method-assign]  # no sandbox is needed here
    services.provenance.authored = trusting  # type: ignore[method-assign]
    recorded = runs.of("ana") if isinstance(runs, Runs) else runs
    services.runs_or_error = lambda _: recorded  # type: ignore[method-assign,assignment]  # the store of the test
    context = Context(services, NO_CALLER, Catalog(space), rights, is_owner=True)
    return await pipeline.run(call, context, None)


def trusting(chain: Chain) -> IsolationDecision:
    """Hold nothing: what is recorded of a run does not depend on it."""
    return decide_isolation(chain, ["builtin"] * len(chain.links))


def only(runs: Runs) -> RunRecord:
    (one,) = runs.list(RunFilter())
    return one


def refused(call: Call, runs: Runs, rights: Rights = Rights()) -> RunRecord:  # noqa: B008 - it is frozen
    with pytest.raises(KiwiError):
        asyncio.run(run(call, runs, rights))
    return only(runs)


@pytest.mark.usefixtures("processes")
async def test_a_successful_run_is_recorded(make: Make, runs: Runs, project: Path) -> None:
    done = await run(make("echo hello\n"), runs)

    one = only(runs)
    assert (one.id, one.tool_id, one.status, one.actor) == (done.id, "say", "success", "ana")
    assert (one.project, one.identity, one.exit_code) == (str(project), "project/local/say@1.0.0", 0)
    assert (one.code, one.message, one.cost_micros) == ("", "", 0)
    assert (len(one.digest), len(one.plan_digest)) == (64, 64)
    assert done.output is not None
    assert one.output == done.output.handle
    assert read_record(project / ".ai", one.output)["run_id"] == one.id
    assert abs(datetime.now(UTC) - datetime.fromisoformat(one.started_at)) < timedelta(minutes=1)


@pytest.mark.usefixtures("processes")
async def test_a_failed_run_is_recorded(make: Make, runs: Runs) -> None:
    await run(make("echo no >&2; exit 3\n"), runs)

    one = only(runs)
    assert (one.status, one.code, one.exit_code) == ("error", "execution_failed", 3)
    assert one.message


@pytest.mark.usefixtures("processes")
async def test_a_run_that_timed_out_is_recorded(make: Make, runs: Runs) -> None:
    await run(make("sleep 30\n", timeout=0.2), runs)

    assert (only(runs).status, only(runs).code) == ("timeout", "timeout")


async def test_a_directive_leaves_a_ready_run(make: Make, runs: Runs, project: Path) -> None:
    call = make("echo unused\n")
    (project / ".ai" / "directives").mkdir()
    (project / ".ai" / "directives" / "greet.md").write_text(DIRECTIVE)
    await run(Call("greet", call.space), runs)

    assert (only(runs).status, only(runs).tool_id) == ("ready", "greet")


@pytest.mark.usefixtures("processes")
async def test_a_cancelled_call_leaves_a_run_and_stays_cancelled(make: Make, runs: Runs, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")

    task = asyncio.create_task(run(make(f"echo yes > {tmp_path}/begun; sleep 30\n"), runs))
    await asyncio.to_thread((tmp_path / "begun").read_text)
    task.cancel()
    await asyncio.wait({task}, timeout=30)
    assert task.cancelled()
    one = only(runs)
    assert (one.status, one.code, one.identity) == ("cancelled", "cancelled", "project/local/say@1.0.0")


def test_a_call_of_an_unknown_item_leaves_a_refusal(make: Make, runs: Runs) -> None:
    one = refused(Call("nothing_here", make("echo\n").space), runs)

    assert (one.status, one.code, one.tool_id, one.identity) == ("refused", "tool_not_found", "nothing_here", "")


def test_invalid_parameters_are_refused_and_not_recorded(make: Make, runs: Runs) -> None:
    one = refused(make("echo\n", word=4_711_815), runs)

    assert (one.status, one.code) == ("refused", "invalid_input")
    assert "word" in one.message
    assert "4711815" not in json.dumps(one.to_json())


def test_a_denied_call_leaves_a_refusal(make: Make, runs: Runs) -> None:
    one = refused(make("echo\n"), runs, Rights((Grant(items=Rules(allow=("*",), deny=("*/say@*",))),)))

    assert (one.status, one.code) == ("refused", "not_permitted")


async def test_an_internal_error_leaves_a_run(make: Make, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(create_driver, "drive", broken)
    with pytest.raises(ZeroDivisionError):
        await run(make("echo\n"), runs)

    assert (only(runs).status, only(runs).code) == ("error", "internal")
    assert "detail" not in only(runs).message


@pytest.mark.usefixtures("processes")
async def test_parameters_are_not_recorded(make: Make, runs: Runs) -> None:
    await run(make("echo hello\n", word="a-private-word"), runs)

    assert "a-private-word" not in json.dumps(only(runs).to_json())


@pytest.mark.usefixtures("processes")
@pytest.mark.case("SEC-05")
def test_a_record_contains_no_secret(make: Make, runs: Runs, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", CANARY)
    done = asyncio.run(run(make('for n in $(seq 5000); do echo "$SERVICE_KEY"; done; echo "$SERVICE_KEY" >&2\n'), runs))
    asyncio.run(run(make('echo "$SERVICE_KEY" >&2; exit 1\n'), runs))

    response = [json.dumps(one.to_json()) for one in runs.list(RunFilter())]
    files = [path.read_text() for path in (project / ".ai" / "outputs").rglob("*.json")]
    assert len(files) == 2
    assert CANARY not in "".join((*response, *files))
    assert CANARY.encode() not in runs.result(str(done.id))


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-RT-05")
async def test_a_large_result_is_stored_only_in_the_store_and_read_by_its_handle(
    make: Make, runs: Runs, project: Path
) -> None:
    done = await run(make(LARGE), runs)

    assert done.response == {
        "result": "k" * PREVIEW,
        "result_is_preview": True,
        "result_characters": 100_000,
        "result_handle": only(runs).output,
    }
    kept = read_record(project / ".ai", only(runs).output)
    assert (kept["result"], kept["result_characters"]) == ("k" * PREVIEW, 100_000)
    assert kept["result_sha256"] == only(runs).result_sha256
    page = read_page(
        project / ".ai", only(runs).output, offset=99_000, length=5_000, stored=runs.result, check=runs.get
    )
    assert (page["content"], page["total_characters"], page["next_offset"]) == ("k" * 1_000, 100_000, None)


@pytest.mark.usefixtures("processes")
async def test_the_same_large_result_twice_is_one_blob(make: Make, runs: Runs, database: Database) -> None:
    for _ in range(2):
        await run(make(LARGE), runs)

    assert len(runs.list(RunFilter())) == 2
    assert database.read("select count(*) from blobs") == [(1,)]


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-RT-05")
async def test_without_a_store_the_file_contains_everything_and_the_owner_is_warned_once(
    make: Make, project: Path
) -> None:
    reason = StoreUnavailable("The home is read-only.", suggestion="Make it writable.")
    done = await run(make(LARGE), reason)

    assert not done.is_recorded
    assert done.warnings == ("The run was not recorded: The home is read-only.",)
    assert done.output is not None
    assert read_record(project / ".ai", done.output.handle)["result"] == "k" * 100_000


@pytest.mark.usefixtures("processes")
def test_a_store_that_fails_loses_neither_the_result_nor_the_refusal(
    make: Make, runs: Runs, database: Database, project: Path
) -> None:
    with database.transaction() as transaction:
        transaction.write("drop table runs")
    done = asyncio.run(run(make(LARGE), runs))
    with pytest.raises(KiwiError, match="nothing_here"):
        asyncio.run(run(Call("nothing_here", make("echo\n").space), runs))

    assert not done.is_recorded
    assert ["was not recorded" in warning for warning in done.warnings] == [True]
    assert done.output is not None
    assert read_record(project / ".ai", done.output.handle)["result"] == "k" * 100_000


def ask(runs: Runs, action: Json = "list", **words: Json) -> JsonObject:
    if action == "show":
        return shown(parse(RunShowRequest, "runs", words), runs).to_json()
    return listed(parse(RunsListRequest, "runs", words), runs, datetime.now(UTC)).to_json()


@pytest.mark.usefixtures("processes")
def test_runs_are_listed_page_by_page(make: Make, runs: Runs) -> None:
    for number in range(3):
        asyncio.run(run(make(f"exit {number % 2}\n", name="odd" if number % 2 else "even"), runs))

    first = ask(runs, limit=2)
    rest = ask(runs, limit=2, before=first["next"])
    response = [as_object(one) for one in (*as_list(first["runs"]), *as_list(rest["runs"]))]
    assert [(one["tool_id"], one["status"]) for one in response] == [
        ("even", "success"),
        ("odd", "error"),
        ("even", "success"),
    ]
    assert {*response[0]} == {"id", "tool_id", "identity", "status", "started_at", "duration_ms", "cost_micros"}
    assert {*response[1]} == {*response[0], "code", "message"}
    assert rest["next"] is None
    assert len(as_list(ask(runs, tool="even")["runs"])) == 2
    assert len(as_list(ask(runs, status="error")["runs"])) == 1


@pytest.mark.usefixtures("processes")
def test_runs_are_found_by_project_and_time(make: Make, runs: Runs, project: Path) -> None:
    asyncio.run(run(make("echo\n"), runs))

    def found(**words: Json) -> int:
        return len(as_list(ask(runs, **words)["runs"]))

    assert (found(project_path=str(project)), found(project_path=f"{project}/.ai/..")) == (1, 1)
    assert (found(project_path="/nowhere"), found(project_path="/\0")) == (0, 0)
    assert (found(since="2h"), found(until="2h"), found(since="5 m", until="0s")) == (1, 0, 1)
    assert (found(since="2020-01-01"), found(until="2020-01-01T00:00:00Z")) == (1, 0)


def test_an_invalid_time_is_refused(runs: Runs) -> None:
    for moment in ("", "yesterday", "2h3m", "999999w", "2026-13-01"):
        with pytest.raises(InvalidRequest):
            ask(runs, since=moment)


@pytest.mark.usefixtures("processes")
def test_a_run_is_shown_in_full_with_its_result(make: Make, runs: Runs) -> None:
    small = asyncio.run(run(make("echo hello; echo note >&2\n"), runs)).id
    large = asyncio.run(run(make(LARGE), runs)).id

    shown = ask(runs, action="show", run_id=small)
    assert (shown["id"], shown["result"], shown["exit_code"]) == (small, "hello", 0)
    assert as_object(shown["logs"])["stderr"] == "note\n"
    shown = ask(runs, action="show", run_id=large)
    assert (shown["result"], shown["result_handle"]) == ("k" * PREVIEW, shown["output"])
    assert int(str(shown["result_characters"])) > INLINE_LIMIT


@pytest.mark.usefixtures("processes")
def test_a_run_is_shown_without_its_pruned_result(make: Make, runs: Runs, project: Path) -> None:
    one = asyncio.run(run(make("echo hello\n"), runs))
    assert one.output is not None
    path = project / one.output.path
    for text in ('{"run_id": "another", "result": "not it"}', "{", None):
        path.unlink() if text is None else path.write_text(text)
        assert "result" not in ask(runs, action="show", run_id=one.id)


def test_an_unknown_run_is_not_found(runs: Runs) -> None:
    for wanted in ("", "x", "0" * 26, "../etc/passwd"):
        with pytest.raises(RunNotFound):
            ask(runs, action="show", run_id=wanted)


def test_an_unknown_page_and_a_missing_run_id_are_refused(runs: Runs) -> None:
    with pytest.raises(RunNotFound):
        ask(runs, before="x")
    with pytest.raises(InvalidRequest):
        ask(runs, action="show")


def test_old_runs_are_removed_on_request(database: Database) -> None:
    runs = Runs(database, retention=RunRetention(count=1))
    for noise in (1, 2, 3):
        runs.add(RunRecord(run_id(1_769_601_600_000, noise), "say", "success", "2026-01-28T12:00:00.000Z", 1, "", ""))

    removed = pruned(runs, datetime(2026, 1, 28, 12, tzinfo=UTC))
    assert removed.to_json() == {
        "action": "prune",
        "status": "success",
        "message": "2 runs and 0 large results removed",
        "runs": 2,
        "results": 0,
    }
