"""Each gate alone: all other conditions hold, only its own fails, and the call is refused before anything runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.calls import (
    NO_CALLER,
    Answers,
    Call,
    Caller,
    CallOrigin,
    Principal,
    Questions,
    Served,
    Space,
    no_answers,
)
from kiwi_mcp.domain.errors import (
    ApprovalRequired,
    Conflict,
    DriverMissing,
    IntegrityMismatch,
    InvalidArguments,
    IsolationUnavailable,
    KiwiError,
    LockMismatch,
    NotCallable,
    PolicyDenied,
    RateLimited,
    StoreUnavailable,
    ToolNotFound,
    Unavailable,
    VariableMissing,
)
from kiwi_mcp.domain.grants import Allow, Deny, Grant, Rights, Rules, hiding
from kiwi_mcp.domain.isolation import Level, Provenance
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import HttpSpec, Plan
from kiwi_mcp.domain.records import ApprovalRule, ReceiptEntry
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.drivers.process import Process
from kiwi_mcp.kernel import Kernel, pipeline
from kiwi_mcp.kernel.context import Context, Services
from kiwi_mcp.kernel.pipeline import plan_call
from kiwi_mcp.kernel.recorder import Run
from kiwi_mcp.kernel.verbs import find_verb
from kiwi_mcp.policy.isolation import IsolationDecision, decide_isolation
from kiwi_mcp.policy.policy_files import rights_of
from kiwi_mcp.store.receipts import ReceiptFilter
from kiwi_mcp.store.runs import RunFilter, new_run

pytestmark = pytest.mark.usefixtures("sandbox")

TOOL = """tool_id: say
tool_type: script
version: 1.0.0
executor: bash_runtime
config: {{entrypoint: main.sh, env: {env}}}
parameters: [{{name: count, type: integer, required: true}}]
{more}
"""
SECRET = "canary-41bd-secret-value"


class Bench:
    """One project with a tool that leaves a marker when it runs, and a kernel that isolates nothing."""

    def __init__(self, project: Path, home: Path) -> None:
        self.project, self.home = project, home
        self.marker = project / "ran"
        self.kernel = Kernel(project)
        self.services: Services = self.kernel._services
        self.hold("trusted")
        self.write()

    def write(self, more: str = "", env: str = "{}", script: str = "") -> None:
        folder = self.project / ".ai" / "tools" / "say"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tool.yaml").write_text(TOOL.format(more=more, env=env))
        (folder / "main.sh").write_text(f"echo ran > {self.marker}\n{script}")

    def hold(self, level: Level, provenance: Provenance = "builtin") -> None:
        """Give every chain one level of isolation."""

        def judge(chain: Chain) -> IsolationDecision:
            return replace(decide_isolation(chain, [provenance] * len(chain.links)), level=level)

        self.services.provenance.held = judge  # type: ignore[method-assign]  # no sandbox is needed here
        self.services.provenance.authored = judge  # type: ignore[method-assign]  # secrets depend on this one

    def context(self, caller: Caller = NO_CALLER, rights: Rights | None = None) -> Context:
        context = self.services.context(caller, self.services.catalogs.of(str(self.project)))
        return replace(context, rights=rights) if rights else context

    def call(self, item: str = "say", **parameters: Json) -> Call:
        space = Space(self.project, self.home / ".ai", self.home / ".cache" / "kiwi")
        return Call(item, space, parameters or {"count": 1})

    def run(self, call: Call | None = None, caller: Caller = NO_CALLER, rights: Rights | None = None) -> Run:
        async def made() -> Run:
            try:
                return await pipeline.run(call or self.call(), self.context(caller, rights), None)
            finally:
                await self.kernel.aclose()

        return asyncio.run(made())

    def refuses(
        self, kind: type[KiwiError], call: Call | None = None, rights: Rights | None = None, caller: Caller = NO_CALLER
    ) -> KiwiError:
        with pytest.raises(KiwiError) as refused:
            self.run(call, caller, rights)
        assert type(refused.value) is kind, refused.value
        assert not self.marker.exists()
        return refused.value

    def ask(self, verb: str, caller: Caller = NO_CALLER, **request: Json) -> JsonObject:
        return ask(self.kernel, verb, caller, **request)

    def allow(self) -> None:
        """Add a rule by which the tool runs without a question."""
        approvals = self.services.store.approvals()
        approvals.add_rule(ApprovalRule(new_run(1)[0], "*/say@*", 1, approvals.owner, project=str(self.project)))


def ask(kernel: Kernel, verb: str, caller: Caller = NO_CALLER, **request: Json) -> JsonObject:
    async def called() -> JsonObject:
        try:
            return (await kernel.call(verb, json.loads(json.dumps(request)), caller)).content
        finally:
            await kernel.aclose()

    return asyncio.run(called())


@pytest.fixture
def bench(project: Path, home: Path) -> Bench:
    return Bench(project, home)


def test_a_call_runs_when_every_condition_holds(bench: Bench) -> None:
    assert bench.run().outcome.is_success
    assert bench.marker.exists()


def test_gate_1_an_item_that_does_not_exist_is_refused(bench: Bench) -> None:
    bench.refuses(ToolNotFound, bench.call("another"))


def test_gate_2_an_item_without_a_driver_is_refused(bench: Bench) -> None:
    bench.refuses(NotCallable, bench.call("bash_runtime"))
    bench.services.drivers._loaded["process"] = None
    bench.refuses(DriverMissing)


def test_gate_3_arguments_that_do_not_fit_are_refused_before_permissions(bench: Bench) -> None:
    denied = Rights((Grant(items=Rules(allow=("*",), deny=("*/say@*",))),))
    bench.refuses(InvalidArguments, bench.call(count="many"), denied)


def test_gate_4_an_item_that_was_changed_after_it_was_signed_is_refused(bench: Bench) -> None:
    assert "code" not in bench.ask("execute", action="sign", item_id="say")
    with (bench.project / ".ai/tools/say/main.sh").open("a") as file:
        file.write("echo changed\n")
    bench.refuses(IntegrityMismatch)


def test_gate_5_an_item_that_no_rule_permits_is_refused(bench: Bench) -> None:
    bench.refuses(PolicyDenied, rights=Rights((Grant(items=Rules(allow=("*",), deny=("*/say@*",))),)))


def test_gate_5_an_item_that_runs_on_a_denied_one_is_refused(bench: Bench) -> None:
    bench.refuses(PolicyDenied, rights=Rights((Grant(items=Rules(allow=("*",), deny=("*/bash_runtime@*",))),)))


def test_gate_5_an_item_that_runs_on_a_hidden_one_is_refused() -> None:
    rights = Rights((Grant(), hiding(frozenset({"registry/public/secret"}), "the registry")))
    assert isinstance(rights.item_verdict(["project/local/say@1.0.0", "registry/public/secret@1.0.0"]), Deny)
    assert isinstance(rights.item_verdict(["project/local/say@1.0.0", "registry/public/secrets@1.0.0"]), Allow)
    assert isinstance(rights.verdict("write", "/elsewhere/notes"), Deny)  # as the owner's grant says


def test_gate_6_an_item_that_needs_what_is_not_granted_is_refused(bench: Bench) -> None:
    bench.write("needs: {read: [/srv/data]}")
    bench.refuses(PolicyDenied, rights=Rights((Grant(read=Rules(allow=("**",), deny=("/srv/**",))),)))


def test_gate_7_the_hosts_of_the_rules_are_part_of_the_plan(bench: Bench) -> None:
    (bench.project / ".ai/tools/get.yaml").write_text(
        "tool_id: get\ntool_type: api\nversion: 1.0.0\nexecutor: http_client\n"
        "config: {method: GET, url: https://api.example.com/x}\n"
    )
    hosts = Rules(allow=("api.example.com",), deny=("evil.example.com",))
    call = Call("get", bench.call().space)
    spec = plan_call(call, bench.context(rights=Rights((Grant(hosts=hosts),)))).plan.spec
    assert isinstance(spec, HttpSpec)
    assert (spec.granted, spec.denied) == (hosts.allow, hosts.deny)


def test_gate_8_a_frozen_call_of_what_was_never_signed_is_refused(bench: Bench) -> None:
    bench.refuses(LockMismatch, replace(bench.call(), is_frozen=True))


def test_gate_9_a_program_that_is_denied_is_refused(bench: Bench) -> None:
    bench.refuses(PolicyDenied, rights=Rights((Grant(commands=Rules(allow=("*",), deny=("bash",))),)))


def test_gate_10_an_argument_beyond_its_bound_is_refused(bench: Bench) -> None:
    (bench.home / ".ai").mkdir(exist_ok=True)
    (bench.home / ".ai/policy.yaml").write_text(
        "conditions:\n  - {items: '*/say@*', parameters: {count: {maximum: 1}}}\n"
    )
    rights = rights_of(bench.home / ".ai")
    bench.refuses(PolicyDenied, bench.call(count=2), rights)
    assert bench.run(bench.call(count=1), rights=rights).outcome.is_success


def test_gate_11_calls_beyond_the_rate_of_a_rule_are_refused_until_the_minute_has_passed(bench: Bench) -> None:
    (bench.home / ".ai").mkdir(exist_ok=True)
    (bench.home / ".ai/policy.yaml").write_text(
        "conditions: [{items: '*/say@*', per_minute: 2}]\nactors: {bob: {conditions: [{items: '*', per_minute: 1}]}}\n"
    )
    bob = Caller(name="bob", identity=Principal("agent", "bob"))
    assert bench.run(caller=bob).outcome.is_success
    bench.marker.unlink()
    refused = bench.refuses(RateLimited, caller=bob)
    assert "policy.yaml for bob allows 1 calls of '*' in a minute" in refused.message
    assert refused.details["retry_after"] in range(50, 61)
    assert bench.run().outcome.is_success
    bench.marker.unlink()
    assert "2 calls of '*/say@*'" in bench.refuses(RateLimited).message
    planned = plan_call(bench.call(), bench.context())  # a plan counts for nothing
    assert planned.prepared.rates


def test_gate_12_a_variable_that_is_not_set_is_refused_before_the_owner_is_asked(bench: Bench) -> None:
    bench.write("mutates_state: true", env='{KEY: "${SERVICE_KEY}"}')
    bench.refuses(VariableMissing)


def test_gate_13_an_item_of_a_server_that_cannot_be_listed_does_not_run(bench: Bench) -> None:
    async def unreachable(*_: object) -> Unavailable:
        return Unavailable("The server is down.", suggestion="Start it.")

    bench.services.check_server = unreachable  # type: ignore[method-assign,assignment]  # a server that is down
    assert bench.run().outcome.status == "unavailable"
    assert not bench.marker.exists()


def test_gate_14_a_plan_that_changes_something_is_refused_without_an_approval(bench: Bench) -> None:
    bench.write("mutates_state: true")
    bench.refuses(ApprovalRequired)


def test_gate_14_an_item_that_changes_while_the_owner_is_asked_is_refused(bench: Bench) -> None:
    bench.write("mutates_state: true")

    async def slow(questions: Questions) -> Answers:
        bench.write("mutates_state: true", script="echo more\n")
        return {key: {"action": "accept", "content": {"approve": True}} for key in questions}

    bench.refuses(Conflict, caller=Caller(ask=slow, is_owner=True))


def test_gate_15_without_its_sandbox_nothing_is_asked_and_nothing_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.drivers.sandboxed.choose", _no_sandbox)
    bench.write("mutates_state: true")
    bench.hold("standard")
    bench.refuses(IsolationUnavailable)
    assert bench.ask("approvals", action="list")["approvals"] == []


def _no_sandbox(*_: object) -> None:
    raise IsolationUnavailable("There is no sandbox.", suggestion="Install one.")


async def _no_git(_: Path) -> None:
    raise Unavailable("git is not installed.", suggestion="Install git.")


def test_gate_16_without_the_checkpoint_that_was_asked_for_nothing_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.kernel.checkpoints.git_store._make_private", _no_git)
    bench.refuses(Unavailable, replace(bench.call(), has_checkpoint=True))


def test_gate_17_a_changing_call_does_not_start_if_it_cannot_be_recorded(bench: Bench) -> None:
    bench.write("mutates_state: true")
    bench.allow()
    reason = StoreUnavailable("The disk is full.", suggestion="Free space.")
    bench.services.runs_or_error = lambda _: reason  # type: ignore[method-assign,assignment]  # a store that fails
    refused = bench.refuses(StoreUnavailable)
    assert refused.message.startswith("Nothing ran")


def test_a_reading_call_runs_even_if_it_cannot_be_recorded(bench: Bench) -> None:
    reason = StoreUnavailable("The disk is full.", suggestion="Free space.")
    bench.services.runs_or_error = lambda _: reason  # type: ignore[method-assign,assignment]  # a store that fails
    assert bench.run().warnings == ("The run was not recorded: The disk is full.",)


def test_gate_17_a_changing_run_is_stored_as_started_while_it_runs(bench: Bench) -> None:
    bench.write("mutates_state: true", script=f"cat {bench.project / 'go'}\n")
    bench.allow()
    os.mkfifo(bench.project / "go")

    async def watched() -> tuple[str, str]:
        context = bench.context()
        task = asyncio.create_task(pipeline.run(bench.call(), context, None))
        go = await asyncio.to_thread((bench.project / "go").open, "w")  # waits until the tool reads
        with go:
            (during,) = bench.services.store.runs().list(RunFilter())
        await task
        (after,) = bench.services.store.runs().list(RunFilter())
        await bench.kernel.aclose()
        return during.status, after.status

    assert asyncio.run(watched()) == ("started", "success")


def test_a_reserved_id_and_the_thread_of_a_call_are_in_its_records(bench: Bench) -> None:
    reserved = new_run(1)[0]
    call = replace(bench.call(), run_id=reserved, origin=CallOrigin("thread-1", "step-7", 2))

    async def recorded() -> tuple[str, ReceiptEntry]:
        payload: JsonObject = {"item_id": "say"}
        record = bench.services.recorder.call("execute", find_verb("execute", payload), payload)
        await pipeline.run(call, bench.context(), record)
        (run,) = bench.services.store.runs().list(RunFilter())
        (entry,) = bench.services.store.receipts().list(ReceiptFilter())
        await bench.kernel.aclose()
        return run.id, entry

    run_id, entry = asyncio.run(recorded())
    assert (run_id, entry.receipt.id) == (reserved, reserved)
    assert json.loads(entry.receipt.detail) == {"thread": "thread-1", "key": "step-7", "depth": 2}


KILLED = """
import asyncio, sys
from pathlib import Path
from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.kernel import Kernel

async def agree(questions):
    return {key: {"action": "accept", "content": {"approve": True}} for key in questions}

request = {"item_id": "say", "parameters": {"count": 1}}
asyncio.run(Kernel(Path(sys.argv[1])).call("execute", request, Caller(ask=agree, is_owner=True)))
"""


def test_a_run_of_a_killed_kernel_is_unknown_and_has_a_receipt(bench: Bench) -> None:
    bench.write("mutates_state: true", script=f"cat {bench.project / 'go'}\n")
    assert "code" not in bench.ask("execute", action="sign", item_id="say")
    relaxed = ask(Kernel(bench.project), "relax", action="apply", item_id="say", to="trusted")
    assert "code" not in relaxed
    os.mkfifo(bench.project / "go")
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(bench.project)])
    with (bench.project / "go").open("w"):  # waits until the tool reads
        (row,) = as_list(bench.ask("runs", action="list")["runs"])
        assert as_object(row)["status"] == "started"
        child.send_signal(signal.SIGKILL)
        child.wait(120)
    (row,) = as_list(bench.ask("runs", action="list")["runs"])
    assert as_object(row)["status"] == "unknown"
    receipts = [as_object(one) for one in as_list(bench.ask("audit", action="list")["receipts"])]
    assert [one["status"] for one in receipts if one["action"] == "run"] == ["unknown"]


class Spy(Process):
    """The process driver, which takes down what it is given and starts nothing."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []
        self.outcome = Outcome("success")

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Check nothing."""

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: object
    ) -> Outcome:
        self.callers.append(caller)
        return self.outcome


@pytest.fixture
def spy(bench: Bench) -> Spy:
    driver = bench.services.drivers._loaded["process"] = Spy()
    return driver


def test_gate_18_a_tool_cannot_ask_a_caller_that_declared_nothing(bench: Bench, spy: Spy) -> None:
    async def answers(questions: Questions) -> Answers:
        return {key: {} for key in questions}

    bench.run(caller=Caller(ask=answers))
    (caller,) = spy.callers
    assert caller.ask is no_answers


def test_gate_20_a_caller_that_received_untrusted_text_is_remembered(bench: Bench, spy: Spy) -> None:
    bench.run()
    assert not bench.services.tainted_callers
    bench.hold("restricted", "unknown")
    spy.outcome = Outcome("error")
    bench.run()
    assert bench.services.tainted_callers == {""}


def test_gate_21_a_secret_does_not_leave_in_an_outcome(bench: Bench, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", SECRET)
    bench.write(env='{KEY: "${SERVICE_KEY}"}')
    spy.outcome = Outcome("error", result={"key": SECRET}, message=f"not {SECRET}", details={"key": SECRET})
    outcome = bench.run().outcome
    assert outcome.status == "error"
    assert SECRET not in str(outcome)


def test_gate_22_refused_and_finished_calls_are_recorded(bench: Bench) -> None:
    bench.refuses(InvalidArguments, bench.call(count="many"))
    bench.run()
    assert [one.status for one in bench.services.store.runs().list(RunFilter())] == ["success", "refused"]


@pytest.fixture
def model(bench: Bench) -> Kernel:
    """A kernel that a model asks, not the owner."""
    return Kernel(bench.project, is_owner=False, surface="mcp")


def test_gate_a1_an_unknown_verb_and_an_invalid_request_are_refused(bench: Bench) -> None:
    assert bench.ask("nothing")["code"] == "verb_not_found"
    assert bench.ask("execute", item_id="say", parameters={"count": 1}, surprise=True)["code"] == "invalid_request"
    assert not bench.marker.exists()


def test_gate_a2_an_owner_verb_is_refused_for_others(model: Kernel, home: Path) -> None:
    assert ask(model, "secrets", action="set", name="KEY", value="x")["code"] == "not_permitted"


def test_gate_a3_another_project_than_the_served_one_is_refused(bench: Bench, tmp_path: Path) -> None:
    kernel = Kernel(bench.project, served=Served(tmp_path / "served"))
    refused = ask(kernel, "execute", item_id="say", parameters={"count": 1}, project_path=str(bench.project))
    assert refused["code"] == "not_permitted"
    assert not bench.marker.exists()


def test_gate_a3_a_caller_that_may_not_author_is_refused(bench: Bench) -> None:
    kernel = Kernel(bench.project, served=Served(None))
    assert ask(kernel, "execute", action="sign", item_id="say")["code"] == "not_permitted"
    assert "code" not in ask(kernel, "execute", Caller(can_author=True), action="sign", item_id="say")


def test_gate_a3_a_caller_that_may_not_write_does_not_publish(bench: Bench) -> None:
    kernel, actor = Kernel(bench.project, served=Served(None)), Actor("agent", ("acme",))
    reader = Caller(name="agent", can_author=True, actor=actor)
    assert ask(kernel, "execute", reader, action="publish", item_id="say")["code"] == "not_permitted"
    published = ask(kernel, "execute", replace(reader, can_write=True), action="publish", item_id="say")
    assert published["identity"] == "registry/acme/say@1.0.0"
    without_actor = replace(reader, can_write=True, actor=None)
    assert ask(kernel, "execute", without_actor, action="publish", item_id="say")["code"] == "namespace_denied"


def test_gate_a4_a_registry_that_the_owner_did_not_name_is_refused(model: Kernel) -> None:
    refused = ask(model, "registry", action="pull", remote="https://registry.example.com")
    assert refused["code"] == "not_permitted"


def test_gate_a5_a_verb_that_the_rules_deny_is_refused(bench: Bench) -> None:
    (bench.home / ".ai").mkdir(exist_ok=True)
    (bench.home / ".ai/policy.yaml").write_text("verbs: {deny: [execute.run]}\n")
    assert bench.ask("execute", item_id="say", parameters={"count": 1})["code"] == "not_permitted"
    assert not bench.marker.exists()


def test_gate_a6_an_unlisted_item_is_not_pulled_to_a_managed_machine(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deployment.yaml").write_text("deployment: managed\nitems: {allow: ['project/local/say*']}\n")
    monkeypatch.setenv("KIWI_DEPLOYMENT", str(tmp_path / "deployment.yaml"))
    manifest = {"tool_id": "other", "tool_type": "knowledge", "version": "1.0.0", "description": "x"}
    refused = bench.ask("execute", action="create", parameters={"manifest": manifest, "content": "# x"})
    assert refused["code"] == "not_permitted"


AGENT = Caller(name="agent", identity=Principal("agent", "agent"))


def test_gate_a7_a_hidden_item_is_not_found(bench: Bench) -> None:
    (bench.home / ".ai").mkdir(exist_ok=True)
    (bench.home / ".ai/policy.yaml").write_text(HIDING)
    assert bench.ask("load", AGENT, item_type="tool", item_id="say")["code"] == "tool_not_found"
    assert bench.ask("execute", AGENT, item_id="say", parameters={"count": "many"})["code"] == "tool_not_found"
    assert not bench.marker.exists()


def test_gate_a7_a_hidden_item_is_not_validated_by_its_name(bench: Bench) -> None:
    (bench.home / ".ai").mkdir(exist_ok=True)
    (bench.home / ".ai/policy.yaml").write_text(HIDING)
    assert bench.ask("execute", AGENT, action="validate", item_id="say")["code"] == "tool_not_found"
    assert bench.ask("execute", action="validate", item_id="say")["valid"] is True


def test_gate_a7_lists_leave_hidden_items_out(bench: Bench) -> None:
    (bench.home / ".ai").mkdir(exist_ok=True)
    (bench.home / ".ai/policy.yaml").write_text(HIDING)
    manifest = "tool_id: helper\ntool_type: mcp_server\nversion: 1.0.0\nconfig: {transport: stdio, command: 'true'}\n"
    (bench.project / ".ai/tools/helper").mkdir(parents=True)
    (bench.project / ".ai/tools/helper/tool.yaml").write_text(manifest)

    assert bench.ask("execute", AGENT, action="list")["items"] == []
    assert bench.ask("execute", action="list")["items"]
    assert bench.ask("mcp", AGENT, action="list")["servers"] == []
    assert [as_object(one)["server"] for one in as_list(bench.ask("mcp", action="list")["servers"])] == ["helper"]
    for action in ("list", "diff", "refresh"):
        for name in ("helper", "say", "nothing"):
            refused = bench.ask("mcp", AGENT, action=action, server=name)
            assert refused["code"] == "tool_not_found"
            assert name == "helper" or "helper" not in str(refused)


HIDING = "actors:\n  agent:\n    items: {allow: ['*/other@*']}\n"


def test_gate_a8_a_named_caller_loads_nothing_while_the_rules_are_unreadable(bench: Bench) -> None:
    (bench.home / ".ai").mkdir(exist_ok=True)
    (bench.home / ".ai/policy.yaml").write_text("items: 7\n")
    owner = Caller(name="agent")
    assert bench.ask("load", owner, item_type="tool", item_id="say")["code"] == "invalid_manifest"
    assert "code" not in bench.ask("load", item_type="tool", item_id="say")


def test_gate_a9_signing_is_refused_if_its_receipt_cannot_be_written(bench: Bench) -> None:
    (bench.home / ".ai").mkdir(exist_ok=True)
    (bench.home / ".ai" / "state").write_text("a file where the store's folder should be")
    before = (bench.project / ".ai/tools/say/tool.yaml").read_text()
    assert bench.ask("execute", action="sign", item_id="say")["code"] == "store_unavailable"
    assert (bench.project / ".ai/tools/say/tool.yaml").read_text() == before


def test_gate_a10_an_invalid_project_folder_is_refused(bench: Bench) -> None:
    refused = bench.ask("execute", project_path="project", item_id="say", parameters={"count": 1})
    assert refused["code"] == "project_path_invalid"
    assert not bench.marker.exists()
