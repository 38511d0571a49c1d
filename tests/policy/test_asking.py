"""Which plans need approval, and what a rule covers."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.isolation import Provenance, SandboxProfile
from kiwi_mcp.domain.items import Chain, Location, Manifest, Source, Tool, TypeTraits
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec, ReadSpec
from kiwi_mcp.domain.records import ApprovalRule, Effects
from kiwi_mcp.policy.approval_rules import effects_of, matching_rule, reasons, waits_first

NOW = 1_769_601_600_000
IDENTITY = "project/local/git@1.0.0"


def a_chain(
    *, changes: bool = False, source: Source = "project", is_served: bool = False, needs: JsonObject | None = None
) -> Chain:
    manifest = Manifest("git", "script", "1.0.0", mutates_state=changes, extra={"needs": needs or {}})
    traits = TypeTraits("mcp", "server", "server") if is_served else TypeTraits("process", "call")
    return Chain((Tool(manifest, Location(source, Path("/p/git.yaml"), Path("/p"))),), (traits,))


def a_process(*argv: str, profile: SandboxProfile | None = None) -> Plan:
    spec = ProcessSpec(argv or ("git", "status"), "/p")
    return Plan(IDENTITY, "d", "process", (), spec, {}, profile=profile or SandboxProfile("sandboxed"))


def a_request(method: str, **words: str) -> Plan:
    return Plan(IDENTITY, "d", "http", (), HttpSpec(method, "https://user@api.example.com:8443/x", **words), {})  # type: ignore[arg-type]  # the words of the case


def of_server(plan: Plan, *, only_reads: bool = False) -> Plan:
    return replace(plan, driver="mcp", only_reads=only_reads)


def a_rule(**words: object) -> ApprovalRule:
    return ApprovalRule("R", IDENTITY, NOW, "ann", **{"project": "/p", **words})  # type: ignore[arg-type]  # the words of the case


def covered(
    rules: list[ApprovalRule], plan: Plan, touches: Effects, *, project: str = "/p", content: str = "d"
) -> ApprovalRule | None:
    return matching_rule(rules, plan, touches, actor="ann", project=project, contents={content}, scopes=(), now=NOW)


@pytest.mark.parametrize(
    ("plan", "chain", "expected"),
    [
        (a_process(), a_chain(), Effects()),
        (a_process(), a_chain(changes=True), Effects()),
        (a_process(profile=SandboxProfile("sandboxed", writable=("/p/notes",))), a_chain(), Effects(("/p/notes",))),
        (
            a_process(profile=SandboxProfile("sandboxed", hosts=("api.example.com",))),
            a_chain(),
            Effects((), ("api.example.com",)),
        ),
        (a_process(profile=SandboxProfile("trusted")), a_chain(), Effects()),
        (a_process(profile=SandboxProfile("trusted")), a_chain(changes=True), Effects(("/",))),
        (a_process(profile=SandboxProfile("standard")), a_chain(changes=True), Effects(("/",))),
        (
            a_process(profile=SandboxProfile("trusted")),
            a_chain(needs={"write": ["x"], "hosts": ["h"]}),
            Effects(("/",), ("h",)),
        ),
        (a_request("GET"), a_chain(), Effects()),
        (a_request("head"), a_chain(), Effects()),
        (a_request("POST"), a_chain(), Effects((), ("api.example.com:8443",))),
        (a_request("GET", stream="websocket"), a_chain(), Effects((), ("api.example.com:8443",))),
        (Plan(IDENTITY, "d", "read", (), ReadSpec("a", "b"), {}), a_chain(changes=True), Effects()),
    ],
)
def test_changing_and_sending_calls_need_approval(plan: Plan, chain: Chain, expected: Effects) -> None:
    assert effects_of(plan, chain) == expected
    assert bool(reasons(expected, ())) == (expected != Effects())


@pytest.mark.case("TR-F07")
def test_a_server_tool_needs_approval_unless_a_remote_server_was_accepted_as_reading() -> None:
    over_http = of_server(a_request("POST"))
    sent = Effects((), ("api.example.com:8443",))
    # Only the driver knows that a server reads: an item that says that it changes nothing is not believed.
    assert effects_of(over_http, a_chain(source="mcp", is_served=True)) == sent
    assert effects_of(over_http, a_chain(source="project", is_served=True)) == sent
    assert effects_of(of_server(a_request("POST"), only_reads=True), a_chain(source="mcp", is_served=True)) == Effects()
    held = of_server(a_process(profile=SandboxProfile("sandboxed", writable=("/p",))))
    assert effects_of(held, a_chain(changes=True, source="mcp", is_served=True)) == Effects(("/p",))
    # What the process may do counts, not that the server says of its tool that it only reads.
    assert effects_of(held, a_chain(source="mcp", is_served=True)) == Effects(("/p",))


def test_code_of_a_model_always_needs_approval() -> None:
    assert waits_first("model_written", Effects())
    assert reasons(Effects(), ["model_written"]) == ("runs for the first time what a model wrote",)
    assert reasons(Effects(), ["model_written"], packages=["six"])[1] == "installs packages for that: six"
    assert reasons(Effects(), (), packages=["six"]) == ()


@pytest.mark.case("TR-F01")
@pytest.mark.parametrize("origin", ["unknown", "known_publisher"])
def test_sending_code_of_others_needs_approval_once(origin: Provenance) -> None:
    sends = Effects(sends=("api.example.com",))
    assert waits_first(origin, sends)
    assert not waits_first(origin, Effects(writes=("/p",)))
    assert reasons(sends, [origin])[0].startswith("runs for the first time what")
    assert not any(waits_first(trusted, sends) for trusted in ("builtin", "owner_written", "owner_pinned"))


@pytest.mark.case("TR-F01")
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_request_with_a_variable_sends_data_with_any_method(method: str) -> None:
    plan = a_request(method)
    assert effects_of(plan, a_chain()) == Effects()
    assert effects_of(replace(plan, variables=("TOKEN",)), a_chain()).sends == ("api.example.com:8443",)


@pytest.mark.case("APPR-07")
@pytest.mark.parametrize(
    ("argv", "is_covered"),
    [
        (("git", "status"), True),
        (("git", "status", "--short"), True),
        (("git", "status; rm -rf /"), False),
        (("git", "-c", "core.pager=rm -rf /", "status"), False),
        (("git", "statusx"), False),
        (("/tmp/git", "status"), False),
        (("bash", "-c", "git status"), False),
        (("git",), False),
    ],
)
def test_a_command_rule_covers_only_its_exact_arguments(argv: tuple[str, ...], is_covered: bool) -> None:
    plan = a_process(*argv, profile=SandboxProfile("sandboxed", writable=("/p",)))
    found = covered([a_rule(argv=("git", "status"))], plan, Effects(("/p",)))
    assert (found is not None) == is_covered


@pytest.mark.parametrize(
    ("words", "touches", "is_covered"),
    [
        ({}, Effects(("/p/notes",), ("a.example",)), True),
        ({"paths": ("/p/notes",)}, Effects(("/p/notes",)), True),
        ({"paths": ("/p/notes",)}, Effects(("/p/notes/today",)), True),
        ({"paths": ("/p/notes",)}, Effects(("/p/notes-too",)), False),
        ({"paths": ("/p/notes",)}, Effects(("/p/notes", "/p/other")), False),
        ({"paths": ("/p/notes",)}, Effects(("/p/notes",), ("a.example",)), False),
        ({"paths": ("/p/notes",)}, Effects(("/",)), False),
        ({"hosts": ("a.example",)}, Effects((), ("a.example",)), True),
        ({"hosts": ("a.example",)}, Effects((), ("a.example.evil.test",)), False),
        ({"hosts": ("a.example",)}, Effects(("/p",), ("a.example",)), False),
        ({"actor": "ann"}, Effects(("/p",)), True),
        ({"actor": "token:agent:1"}, Effects(("/p",)), False),
        ({"expires_at": NOW + 1}, Effects(("/p",)), True),
        ({"expires_at": NOW}, Effects(("/p",)), False),
    ],
)
def test_a_rule_covers_what_it_names_and_nothing_else(
    words: dict[str, object], touches: Effects, is_covered: bool
) -> None:
    found = covered([a_rule(**words)], a_process(), touches)
    assert (found is not None) == is_covered


def test_a_rule_names_its_item_in_full() -> None:
    plan = replace(a_process(), identity="user/local/git@1.0.0")
    assert covered([a_rule()], plan, Effects(("/p",))) is None
    assert covered([replace(a_rule(), item="user/local/*")], plan, Effects(("/p",)))
    assert covered([replace(a_rule(), item="*/local/git")], plan, Effects(("/p",)))
    assert covered([replace(a_rule(), item="*/local/git@2.*")], plan, Effects(("/p",))) is None


def test_a_rule_for_a_project_item_applies_to_that_project_only() -> None:
    touches = Effects(("/p",))
    assert covered([a_rule()], a_process(), touches, project="/p")
    assert covered([a_rule()], a_process(), touches, project="/q") is None
    assert covered([a_rule(project="")], a_process(), touches) is None
    written_out = replace(a_rule(project=""), item="*/git@*")
    assert covered([written_out], a_process(), touches, project="/q")


def test_a_rule_made_from_an_answer_covers_that_content_and_its_effects_only() -> None:
    rule = a_rule(digest="d1", paths=("/p/notes",))
    assert covered([rule], a_process(), Effects(("/p/notes",)), content="d1")
    assert covered([rule], a_process(), Effects(("/p/notes",)), content="d2") is None
    assert covered([rule], a_process(), Effects(("/p/notes",), ("a.example",)), content="d1") is None
    assert covered([a_rule(digest="d1")], a_process(), Effects(("/p",)), content="d1") is None
