"""Rights: rules of the owner for all actors and for each, which every call passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Caller, Principal
from kiwi_mcp.domain.errors import PolicyDenied, TokenRefused
from kiwi_mcp.domain.grants import Allow, Deny, Grant, ResourceKind, Rights, Rules, Verdict, empty_grant
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.surfaces.gateway.auth import VisitedKernel

Ask = Callable[..., Answer]
DIRECTIVE = """# {0}

```xml
<directive name="{0}" version="1.0.0">
  <metadata><description>Daily duty {0}</description><category>work</category><author>me</author><model tier="fast" />
    <permissions>{1}</permissions></metadata>
  <inputs><input name="count" type="integer" /><input name="file" type="string" /></inputs>
  <process><step name="one"><action>Go</action></step></process>
</directive>
```
"""


@pytest.fixture
def policy(home: Path) -> Path:
    (home / ".ai").mkdir(exist_ok=True)
    return home / ".ai" / "policy.yaml"


@pytest.fixture(autouse=True)
def directives(project: Path) -> Path:
    folder = project / ".ai" / "directives" / "work"
    folder.mkdir(parents=True)
    for name in ("greet", "report"):
        (folder / f"{name}.md").write_text(DIRECTIVE.format(name, '<read resource="filesystem" path="docs/**" />'))
    return folder


def as_actor(project: Path, name: str, verb: str, **request: Json) -> JsonObject:
    async def call() -> Answer:
        kernel = Kernel(project, is_owner=False)
        try:
            caller = Caller(name=f"token:{name}:1", identity=Principal("agent", name))
            return await kernel.call(verb, json.loads(json.dumps(request)), caller)
        finally:
            await kernel.aclose()

    return asyncio.run(call()).content


def names(found: JsonObject) -> set[str]:
    return {as_text(as_object(card)["name"]) for card in as_list(found["results"])}


@pytest.mark.req("B4")
@pytest.mark.case("PERM-09")
def test_an_actor_sees_and_uses_only_its_part_and_the_owner_everything(ask: Ask, project: Path, policy: Path) -> None:
    policy.write_text("actors: {bob: {items: {allow: ['*/greet@*'], deny: ['*/other@*']}}}\n")

    assert names(ask("search", query="daily duty").content) >= {"greet", "report"}
    assert ask("execute", item_id="report").content["status"] == "ready"
    assert "report" not in names(as_actor(project, "bob", "search", query="daily duty"))
    assert "greet" in names(as_actor(project, "bob", "search", query="daily duty"))
    assert as_actor(project, "bob", "execute", item_id="greet")["status"] == "ready"
    assert as_actor(project, "eve", "execute", item_id="report")["status"] == "ready"
    # A hidden item gives the same message as a missing one.
    for action in ("run", "why", "versions"):
        hidden = as_actor(project, "bob", "execute", action=action, item_id="report")
        absent = as_actor(project, "bob", "execute", action=action, item_id="nothing")
        assert json.dumps(hidden).replace("report", "nothing") == json.dumps(absent)
    assert as_actor(project, "bob", "load", item_id="report")["code"] == "tool_not_found"


@pytest.mark.req("B4")
@pytest.mark.case("PERM-09")
def test_naming_the_type_shows_no_hidden_item(project: Path, policy: Path, home: Path) -> None:
    policy.write_text("actors: {bob: {items: {allow: ['project/local/greet@*']}}}\n")
    kept = "# tool_id: greet\n# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n# description: x\necho\n"
    (home / ".ai" / "tools").mkdir()
    (home / ".ai" / "tools" / "greet.sh").write_text(kept)

    assert as_actor(project, "bob", "execute", item_id="greet", item_type="directive")["status"] == "ready"
    for verb in ("load", "execute"):
        refused = as_actor(project, "bob", verb, item_id="greet", item_type="tool")
        assert refused["code"] == "tool_not_found"
        assert "user/local" not in json.dumps(refused)
        knowledge = as_actor(project, "bob", verb, item_id="greet", item_type="knowledge")
        assert "user/local" not in json.dumps(knowledge)
    assert "greet.sh" not in json.dumps(as_actor(project, "bob", "load", item_id="greet"))


@pytest.mark.req("B4")
@pytest.mark.case("PERM-09")
def test_an_item_denied_by_name_is_reported_as_denied(project: Path, policy: Path) -> None:
    policy.write_text("actors: {bob: {items: {deny: ['*/report@*']}}}\n")

    response = as_actor(project, "bob", "execute", item_id="report")
    assert (response["code"], response["rule"], response["grant"]) == (
        "not_permitted",
        "*/report@*",
        "policy.yaml for bob",
    )
    assert as_actor(project, "bob", "execute", item_id="raport")["code"] == "tool_not_found"


@pytest.mark.req("B4")
def test_verbs_are_refused_by_name_and_by_action(project: Path, policy: Path) -> None:
    policy.write_text("verbs: {deny: ['execute.delete']}\nactors: {bob: {verbs: {allow: [search, execute.run]}}}\n")

    assert as_actor(project, "bob", "load", item_id="greet")["code"] == "not_permitted"
    assert as_actor(project, "bob", "execute", action="create", item_id="x")["code"] == "not_permitted"
    assert as_actor(project, "bob", "execute", item_id="greet")["status"] == "ready"
    assert as_actor(project, "eve", "execute", action="delete", item_id="greet")["rule"] == "execute.delete"
    assert as_actor(project, "eve", "load", item_id="greet")["name"] == "greet"


def test_removed_rules_apply_to_the_next_call(project: Path, policy: Path) -> None:
    policy.write_text("actors: {bob: {items: {allow: ['*/greet@*']}}}\n")
    assert as_actor(project, "bob", "execute", item_id="greet")["status"] == "ready"
    policy.write_text("actors: {bob: {items: {deny: ['*/greet@*']}}}\n")
    assert as_actor(project, "bob", "execute", item_id="greet")["code"] == "not_permitted"


def test_with_an_unreadable_policy_only_the_owner_may_look(ask: Ask, project: Path, policy: Path) -> None:
    policy.write_text("itmes: {}\n")

    assert names(ask("search", query="daily duty").content)
    assert ask("execute", item_id="greet").is_error
    assert ask("execute", action="delete", item_id="greet").content["code"] == "invalid_manifest"
    assert as_actor(project, "bob", "search", query="daily duty")["code"] == "invalid_manifest"


@pytest.mark.req("B5")
@pytest.mark.parametrize("items", ["*/greet@*", "*/greet"])
def test_a_bound_on_a_parameter_refuses_only_that_call(ask: Ask, policy: Path, items: str) -> None:
    policy.write_text(f"conditions:\n- {{items: '{items}', parameters: {{count: {{maximum: 10}}}}}}\n")

    def run(item: str, count: int) -> JsonObject:
        return ask("execute", item_id=item, parameters={"count": count}).content

    assert run("greet", 10)["status"] == "ready"
    assert run("greet", 11)["code"] == "not_permitted"
    assert run("report", 11)["status"] == "ready"
    assert ask("execute", item_id="greet").content["code"] == "not_permitted"


@pytest.mark.req("B5")
def test_a_path_parameter_must_be_inside_the_condition(ask: Ask, policy: Path, project: Path) -> None:
    (project / "docs").mkdir()
    (project / "docs" / "away").symlink_to("/etc")
    policy.write_text("conditions:\n- {items: '*/greet@*', parameters: {file: {path: 'docs/**'}}}\n")

    def code(file: str) -> object:
        return ask("execute", item_id="greet", parameters={"file": file}).content.get("code")

    assert code("docs/a.md") is None
    assert code(str(project / "docs" / "a.md")) is None
    for file in ("a.md", "docs/../a.md", "docs/away/passwd", "/etc/passwd", "~/docs/a", "docs2/a"):
        assert code(file) == "not_permitted"


@pytest.mark.req("B5")
def test_hours_and_days_limit_when_a_call_may_be_made(ask: Ask, policy: Path) -> None:
    now = datetime.now().astimezone()
    soon, later = (now + timedelta(hours=hours) for hours in (2, 4))
    days = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
    another = days[(now.weekday() + 3) % 7]

    def code(condition: str) -> object:
        policy.write_text(f"conditions:\n- {{items: '*/greet@*', {condition}}}\n")
        return ask("execute", item_id="greet").content.get("code")

    assert code(f'hours: "{soon:%H:%M}-{later:%H:%M}"') == "not_permitted"
    assert code(f'hours: "{later:%H:%M}-{soon:%H:%M}"') is None
    assert code(f"days: [{another}]") == "not_permitted"
    assert code(f"days: [{', '.join(days)}]") is None


@dataclass
class Fixed:
    """An authority that always gives the same answer."""

    rights: Rights

    def authenticate(self, token: str) -> Principal:
        raise TokenRefused(token, suggestion="None.")

    def authorize(self, identity: Principal, resource: str, action: ResourceKind) -> Verdict:
        return self.rights.verdict(action, resource)

    def manage(self, identity: Principal) -> Rights:
        return self.rights


class Broken(Fixed):
    """An authority that cannot decide."""

    def authenticate(self, token: str) -> Principal:
        raise RuntimeError(token)

    def authorize(self, identity: Principal, resource: str, action: ResourceKind) -> Verdict:
        raise RuntimeError(f"{identity} {resource} {action}")

    def manage(self, identity: Principal) -> Rights:
        raise RuntimeError(f"{identity}")


def under(project: Path, authority: Fixed, verb: str, **request: Json) -> JsonObject:
    async def call() -> Answer:
        kernel = Kernel(project, authority=authority)
        try:
            return await kernel.call(verb, request)
        finally:
            await kernel.aclose()

    return asyncio.run(call()).content


@pytest.mark.req("B8", "N3")
def test_another_authority_changes_the_decisions_and_nothing_else(project: Path, policy: Path) -> None:
    policy.write_text("items: {allow: ['*'], deny: ['*/greet@*']}\n")
    open_to_all, closed = Fixed(Rights((Grant(),))), Fixed(Rights((empty_grant("nobody"),)))
    some = Fixed(Rights((Grant(items=Rules(("*/report@*",))),)))

    assert under(project, open_to_all, "execute", item_id="greet")["status"] == "ready"
    assert under(project, some, "execute", item_id="greet")["code"] == "not_permitted"
    assert under(project, some, "execute", item_id="report")["status"] == "ready"
    for verb, request in (("execute", {"item_id": "greet"}), ("search", {"query": "x"}), ("help", {})):
        assert under(project, closed, verb, **request)["code"] == "not_permitted"


@pytest.mark.req("N3")
def test_an_authority_identifies_tokens_and_one_that_cannot_identifies_none(project: Path, home: Path) -> None:
    tokens = TokenStore(home / ".ai")
    secret = tokens.add("ci", [], can_write=False, kind="service")
    visited = VisitedKernel(project, user=home / ".ai")

    assert visited.authenticate(secret) == Principal("service", "ci")
    for kernel in (visited, Kernel(project)):
        with pytest.raises(TokenRefused):
            kernel.authenticate(f"{secret}x")
    with pytest.raises(PolicyDenied):
        Kernel(project, authority=Broken(Rights())).authenticate(secret)


@pytest.mark.req("N3")
def test_an_authority_that_fails_permits_nothing(project: Path) -> None:
    for verb, request in (
        ("execute", {"item_id": "greet"}),
        ("search", {"query": "x"}),
        ("load", {"item_id": "greet"}),
    ):
        response = under(project, Broken(Rights()), verb, **request)
        assert (response["code"], "RuntimeError" in as_text(response["message"])) == ("not_permitted", True)


def test_a_directive_lists_its_permissions_and_a_misspelt_one_is_refused(ask: Ask, directives: Path) -> None:
    response = as_object(ask("execute", item_id="greet").content["result"])
    assert response["permissions"] == {"read": {"allow": ["docs/**"]}}

    (directives / "greet.md").write_text(DIRECTIVE.format("greet", '<raed resource="filesystem" path="docs" />'))
    assert ask("execute", item_id="greet").content["code"] == "invalid_manifest"
    issues = as_list(ask("execute", action="validate", item_id="greet").content["issues"])
    assert "<raed>" in as_text(as_object(issues[0])["reason"])


@pytest.mark.case("PERM-08")
def test_an_invalid_permission_makes_a_directive_unusable(ask: Ask, directives: Path) -> None:
    (directives / "greet.md").write_text(DIRECTIVE.format("greet", '<read resource="filesystem" paht="docs" />'))

    assert ask("execute", item_id="greet").content["code"] == "invalid_manifest"


def test_why_lists_each_rule(ask: Ask, project: Path, policy: Path) -> None:
    tools = project / ".ai" / "tools"
    tools.mkdir()
    (project / "docs").mkdir()
    (tools / "say.sh").write_text(
        "#!/bin/bash\n# tool_id: say\n# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n"
        "# description: Say\n# needs: {read: [docs], hosts: [api.test, evil.test], commands: [git]}\necho 1\n"
    )
    policy.write_text("hosts: {deny: [evil.test]}\ncommands: {deny: [rm]}\n")

    response = ask("execute", action="why", item_id="say").content
    rows = [as_object(row) for row in as_list(response["rights"])]
    shown = {(as_text(row["kind"]), as_text(row["resource"])): row for row in rows}
    assert shown["item", as_text(response["identity"])]["allowed"] is True
    assert shown["host", "evil.test"]["rules"] == [
        {"grant": "policy.yaml", "rule": "evil.test", "allowed": False},
        {"grant": "needs.hosts", "rule": "evil.test", "allowed": True},
    ]
    assert [shown["host", "api.test"]["allowed"], shown["command", "git"]["allowed"]] == [True, True]
    assert as_object(as_list(shown["read", "docs"]["rules"])[-1]) == {
        "grant": "needs.read",
        "rule": "docs",
        "allowed": True,
    }
    assert response["would_run"] is False
    assert any("evil.test" in as_text(as_object(one)["message"]) for one in as_list(response["reasons"]))


def test_verdicts_are_values() -> None:
    kinds: Iterator[Verdict] = iter(Rights().verdicts("item", "a/b/c@1"))

    assert next(kinds) == Allow("policy.yaml", "*")
    assert isinstance(Rights((empty_grant("x"),)).verdict("item", "a"), Deny)
