"""Which plans wait for the owner, and how far a rule reaches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kiwi_mcp.domain.approval import ApprovalRule, Touched
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.items import Manifest, Origin, Source, Tool
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec, ReadSpec
from kiwi_mcp.policy.asking import covering, reasons, touched

NOW = 1_769_601_600_000
IDENTITY = "project/local/git@1.0.0"


def a_chain(
    *, changes: bool = False, source: Source = "project", driver: str = "process", needs: JsonObject | None = None
) -> Chain:
    manifest = Manifest("git", "script", "1.0.0", mutates_state=changes, extra={"needs": needs or {}})
    return Chain((Tool(manifest, Origin(source, Path("/p/git.yaml"), Path("/p"))),), driver)


def a_process(*argv: str, jail: Jail | None = None) -> Plan:
    spec = ProcessSpec(argv or ("git", "status"), "/p")
    return Plan(IDENTITY, "d", "process", (), spec, {}, jail=jail or Jail("sandboxed"))


def a_request(method: str, **words: str) -> Plan:
    return Plan(IDENTITY, "d", "request", (), HttpSpec(method, "https://user@api.example.com:8443/x", **words), {})  # type: ignore[arg-type]  # the words of the case


def of_server(method: str, plan: Plan) -> Plan:
    return replace(plan, driver="mcp", facts={"mcp": {"method": method, "name": "write"}})


def a_rule(**words: object) -> ApprovalRule:
    return ApprovalRule("R", IDENTITY, NOW, "ann", **{"project": "/p", **words})  # type: ignore[arg-type]  # the words of the case


def covered(
    rules: list[ApprovalRule], plan: Plan, touches: Touched, *, project: str = "/p", content: str = "d"
) -> ApprovalRule | None:
    return covering(rules, plan, touches, actor="ann", project=project, content=content, now=NOW)


@pytest.mark.parametrize(
    ("plan", "chain", "expected"),
    [
        (a_process(), a_chain(), Touched()),
        (a_process(), a_chain(changes=True), Touched()),
        (a_process(jail=Jail("sandboxed", writable=("/p/notes",))), a_chain(), Touched(("/p/notes",))),
        (a_process(jail=Jail("sandboxed", hosts=("api.example.com",))), a_chain(), Touched((), ("api.example.com",))),
        (a_process(jail=Jail("trusted")), a_chain(), Touched()),
        (a_process(jail=Jail("trusted")), a_chain(changes=True), Touched(("/",))),
        (a_process(jail=Jail("standard")), a_chain(changes=True), Touched(("/",))),
        (a_process(jail=Jail("trusted")), a_chain(needs={"write": ["x"], "hosts": ["h"]}), Touched(("/",), ("h",))),
        (a_request("GET"), a_chain(), Touched()),
        (a_request("head"), a_chain(), Touched()),
        (a_request("POST"), a_chain(), Touched((), ("api.example.com:8443",))),
        (a_request("GET", stream="websocket"), a_chain(), Touched((), ("api.example.com:8443",))),
        (Plan(IDENTITY, "d", "read", (), ReadSpec("a", "b"), {}), a_chain(changes=True), Touched()),
    ],
)
def test_what_changes_files_or_sends_data_is_asked_about(plan: Plan, chain: Chain, expected: Touched) -> None:
    assert touched(plan, chain) == expected
    assert bool(reasons(expected, ())) == (expected != Touched())


def test_a_tool_of_a_server_is_asked_about_unless_it_was_accepted_as_one_that_reads() -> None:
    over_http = of_server("tools/call", a_request("POST"))
    sent = Touched((), ("api.example.com:8443",))
    assert touched(over_http, a_chain(changes=True, source="mcp", driver="mcp")) == sent
    assert touched(over_http, a_chain(source="mcp", driver="mcp")) == Touched()
    # An item in a folder, which anybody may have written, does not say what a server's tool does.
    assert touched(over_http, a_chain(source="project", driver="mcp")) == sent
    assert touched(of_server("resources/read", a_request("POST")), a_chain(source="mcp", driver="mcp")) == Touched()
    held = of_server("tools/call", a_process(jail=Jail("sandboxed", writable=("/p",))))
    assert touched(held, a_chain(changes=True, source="mcp", driver="mcp")) == Touched(("/p",))
    assert touched(held, a_chain(source="mcp", driver="mcp")) == Touched()


def test_what_a_model_wrote_is_asked_about_whatever_it_touches() -> None:
    assert reasons(Touched(), ("abc",)) == ("runs for the first time what a model wrote",)
    assert reasons(Touched(), ("abc",), packages=["six"])[1] == "installs packages for that: six"
    assert reasons(Touched(), (), packages=["six"]) == ()


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
def test_a_rule_for_a_command_covers_its_exact_words_alone(argv: tuple[str, ...], is_covered: bool) -> None:
    plan = a_process(*argv, jail=Jail("sandboxed", writable=("/p",)))
    found = covered([a_rule(argv=("git", "status"))], plan, Touched(("/p",)))
    assert (found is not None) == is_covered


@pytest.mark.parametrize(
    ("words", "touches", "is_covered"),
    [
        ({}, Touched(("/p/notes",), ("a.example",)), True),
        ({"paths": ("/p/notes",)}, Touched(("/p/notes",)), True),
        ({"paths": ("/p/notes",)}, Touched(("/p/notes/today",)), True),
        ({"paths": ("/p/notes",)}, Touched(("/p/notes-too",)), False),
        ({"paths": ("/p/notes",)}, Touched(("/p/notes", "/p/other")), False),
        ({"paths": ("/p/notes",)}, Touched(("/p/notes",), ("a.example",)), False),
        ({"paths": ("/p/notes",)}, Touched(("/",)), False),
        ({"hosts": ("a.example",)}, Touched((), ("a.example",)), True),
        ({"hosts": ("a.example",)}, Touched((), ("a.example.evil.test",)), False),
        ({"hosts": ("a.example",)}, Touched(("/p",), ("a.example",)), False),
        ({"actor": "ann"}, Touched(("/p",)), True),
        ({"actor": "token:agent:1"}, Touched(("/p",)), False),
        ({"expires_at": NOW + 1}, Touched(("/p",)), True),
        ({"expires_at": NOW}, Touched(("/p",)), False),
    ],
)
def test_a_rule_covers_what_it_names_and_nothing_else(
    words: dict[str, object], touches: Touched, is_covered: bool
) -> None:
    found = covered([a_rule(**words)], a_process(), touches)
    assert (found is not None) == is_covered


def test_a_rule_is_about_its_item_by_the_full_name() -> None:
    plan = replace(a_process(), identity="user/local/git@1.0.0")
    assert covered([a_rule()], plan, Touched(("/p",))) is None
    assert covered([replace(a_rule(), item="user/local/*")], plan, Touched(("/p",)))
    assert covered([replace(a_rule(), item="*/local/git")], plan, Touched(("/p",)))
    assert covered([replace(a_rule(), item="*/local/git@2.*")], plan, Touched(("/p",))) is None


def test_a_rule_for_a_projects_item_holds_in_that_project_alone() -> None:
    touches = Touched(("/p",))
    assert covered([a_rule()], a_process(), touches, project="/p")
    assert covered([a_rule()], a_process(), touches, project="/q") is None
    assert covered([a_rule(project="")], a_process(), touches) is None
    written_out = replace(a_rule(project=""), item="*/git@*")
    assert covered([written_out], a_process(), touches, project="/q")


def test_a_rule_made_from_an_answer_is_for_that_content_and_for_no_more_than_it_touched() -> None:
    rule = a_rule(digest="d1", paths=("/p/notes",))
    assert covered([rule], a_process(), Touched(("/p/notes",)), content="d1")
    assert covered([rule], a_process(), Touched(("/p/notes",)), content="d2") is None
    assert covered([rule], a_process(), Touched(("/p/notes",), ("a.example",)), content="d1") is None
    assert covered([a_rule(digest="d1")], a_process(), Touched(("/p",)), content="d1") is None
