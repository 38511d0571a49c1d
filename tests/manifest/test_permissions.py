"""Permissions of directives: what they grant, and that a misspelt one is refused."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.grants import Allow, Grant, ResourceKind, Rights, Rules, narrow
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.manifest.directive import read_directive
from kiwi_mcp.manifest.permissions import delegate_of, grant_of, permission_faults, said_by

DIRECTIVE = '<directive name="x" version="1.0.0"><metadata><description>X</description>{}</metadata></directive>'


def read(permissions: str) -> object:
    text = DIRECTIVE.format(f"<permissions>{permissions}</permissions>")
    return as_object(read_directive(f"```xml\n{text}\n```\n", what="x")["config"])["permissions"]


def granted(permissions: str) -> Grant:
    written = read(permissions)
    assert permission_faults(written) == ()  # type: ignore[arg-type]  # JSON, as it was read
    return grant_of(written, "x")  # type: ignore[arg-type]  # JSON, as it was read


@pytest.mark.parametrize(
    ("permissions", "kind", "yes", "no"),
    [
        ('<read resource="filesystem" path="src/**"/>', "read", "src/a.py", "docs/a.md"),
        ('<read resource="files" path="src/**/*.ts"/>', "write", "", "src/a.ts"),
        ('<write resource="filesystem" path="out/**"/>', "write", "out/a", "a"),
        ('<write resource="filesystem" path="out/**"/>', "read", "out/a", "a"),
        ('<execute resource="tool" id="mail"/>', "item", "user/local/mail@1.0.0", "user/local/mailer@1.0.0"),
        ('<execute resource="tool" tool_id="user/local/mail"/>', "item", "user/local/mail@1.0.0", "mcp/a/mail@1"),
        ('<execute resource="tool" id="mail"/>', "verb", "execute.run", "execute.create"),
        ('<execute resource="kiwi-mcp" action="execute"/>', "verb", "load", "registry"),
        ('<execute resource="kiwi-mcp" actions="search,sign"/>', "verb", "execute.sign", "execute.run"),
        ('<execute resource="shell" commands="git, jq"/>', "command", "jq", "curl"),
        ('<shell commands="curl"/>', "command", "curl", "git"),
        ('<execute resource="mcp:github" id="search"/>', "item", "mcp/github/search@1", "mcp/gitlab/search@1"),
        ('<read resource="network" endpoint="https://api.test:8443/v1"/>', "host", "api.test:8443", "b.test:443"),
        ('<write resource="api" endpoint="POST /users"/>', "host", "", "api.test:443"),
        ('<read resource="env" var="API_KEY"/>', "variable", "API_KEY", "OTHER"),
        ('<env vars="API_KEY,B"/>', "variable", "B", "C"),
        ('<execute resource="spawn" name="child"/>', "spawn", "child", "other"),
        ('<orchestration allow_categories="work" deny_directives="work/x"/>', "spawn", "work/y", "work/x"),
        ("<cap>fs.read</cap>", "read", "any/file", ""),
        ("<cap>tool.mail</cap>", "item", "user/local/mail@1.0.0", "user/local/rm@1.0.0"),
        ("<cap>process.exec</cap>", "command", "ls", ""),
        ("<cap>spawn.thread</cap>", "spawn", "child", ""),
        ('<read resource="filesystem"/><deny resource="filesystem" path="secrets/**"/>', "read", "a", "secrets/k"),
        ('<execute resource="mcp"/><deny resource="mcp:mail"/>', "item", "mcp/a/x@1", "mcp/mail/x@1"),
    ],
)
def test_a_permission_grants_only_what_it_names(permissions: str, kind: ResourceKind, yes: str, no: str) -> None:
    rights = Rights((granted(permissions),))

    assert not yes or isinstance(rights.verdict(kind, yes), Allow)
    assert not no or not isinstance(rights.verdict(kind, no), Allow)


@pytest.mark.case("PERM-05")
@pytest.mark.parametrize("permissions", ["", "<acknowledge>elevated</acknowledge>"])
def test_no_permissions_are_no_rights(permissions: str) -> None:
    child = narrow(Rights(), granted(permissions))

    assert granted(permissions).to_json() == {}
    for kind, resource in (("item", "a/b/c@1"), ("read", "a"), ("host", "a.test"), ("verb", "help"), ("spawn", "x")):
        assert not isinstance(child.verdict(kind, resource), Allow)  # type: ignore[arg-type]  # kinds, all of them
    assert grant_of(None, "x") == granted("")


@pytest.mark.case("PERM-02")
def test_a_directive_that_asks_for_everything_gets_what_its_owner_allows() -> None:
    owner = Rights((Grant(items=Rules(("*",), ("*/rm@*",)), hosts=Rules((), ("evil.test",))),))
    child = narrow(owner, granted('<execute resource="tool" id="*"/><read resource="network"/>'))

    assert isinstance(child.verdict("item", "user/local/say@1.0.0"), Allow)
    assert not isinstance(child.verdict("item", "user/local/rm@1.0.0"), Allow)
    assert not isinstance(child.verdict("host", "evil.test:443"), Allow)


@pytest.mark.case("PERM-08")
@pytest.mark.parametrize(
    "permissions",
    [
        '<raed resource="filesystem" path="src"/>',
        '<read resorce="filesystem" path="src"/>',
        '<read resource="filesytem" path="src"/>',
        '<read resource="filesystem" paths="src"/>',
        "<execute resource='*'/>",
        "<execute/>",
        "<cap>everything</cap>",
        "<search/>",
        "<execute><tols>a</tols></execute>",
        "<execute><tool></tool></execute>",
        "<execute><tool>mail@1.0.0</tool></execute>",
        "<execute>some tools</execute>",
        '<execute resource="tool" tool_type="bahs"/>',
        '<write resource="api" endpoint="SEND /users"/>',
        '<execute resource="tool" id="x" delegate="perhaps"/>',
        "everything",
    ],
)
def test_a_misspelt_permission_is_an_issue_with_a_fix(permissions: str) -> None:
    found = permission_faults(read(permissions))  # type: ignore[arg-type]  # JSON, as it was read

    assert found
    assert all(issue.is_error and issue.fix and issue.place.startswith("config.permissions[0]") for issue in found)


SCRIPT = ("type/script", "type/runtime", "runtime/bash_runtime", "item/tool/mail", "item/tool/a/b/mail")
DIRECTIVE_TRAITS = ("type/directive", "runtime/llm_runtime", "item/directive/mail", "item/directive/a/mail")


@pytest.mark.req("K-DI-05")
@pytest.mark.parametrize(
    ("permissions", "tool", "directive"),
    [
        ("<execute><tool>mail</tool></execute>", True, True),  # a name is that of the identity
        ("<execute><tool>a.b.*</tool></execute>", True, False),
        ("<execute><tool>a/b/mail</tool></execute>", True, False),
        ("<execute><tool>*</tool></execute>", True, False),
        ("<execute><tool>b.*</tool></execute>", False, False),
        ("<execute><directive>*</directive></execute>", False, True),
        ("<execute><directive>a.mail</directive></execute>", False, True),
        ("<execute><directive>mail</directive></execute>", False, True),
        ("<execute><knowledge>*</knowledge></execute>", False, False),
        ("<execute>*</execute>", True, True),
        ("*", True, True),
        ('<execute resource="tool" tool_type="bash"/>', True, False),
        ('<execute resource="tool" tool_type="script"/>', True, False),
        ('<execute resource="tool" tool_type="bash_runtime"/>', True, False),
        ('<execute resource="tool" tool_type="python"/>', False, False),
        ('<execute resource="tool" id="*"/><deny resource="tool" tool_type="bash"/>', False, True),
        ("<search>*</search><load>*</load><sign>*</sign>", False, False),
    ],
)
def test_items_are_granted_by_name_category_type_and_runtime(permissions: str, tool: bool, directive: bool) -> None:
    rights = Rights((granted(permissions),))

    assert isinstance(rights.item_verdict(["project/local/mail@1.0.0"], SCRIPT), Allow) is tool
    assert isinstance(rights.item_verdict(["project/local/mail@1.0.0"], DIRECTIVE_TRAITS), Allow) is directive


@pytest.mark.req("K-DI-05")
@pytest.mark.parametrize(
    ("endpoint", "yes", "no"),
    [
        ("POST /users", "POST api.test:443/users", "POST api.test:443/evil/users"),
        ("POST /users", "POST other.test:80/users", "GET api.test:443/users"),
        ("GET /users/*", "GET api.test:443/users/7/name", "GET api.test:443/users"),
        ("* /users", "PUT api.test:443/users", "PUT api.test:443/user"),
        ("GET https://api.test/v1/*", "GET api.test:443/v1/a", "GET api.test:80/v1/a"),
    ],
)
def test_an_endpoint_grants_its_method_and_path(endpoint: str, yes: str, no: str) -> None:
    rights = Rights((granted(f'<write resource="api" endpoint="{endpoint}"/>'),))

    assert isinstance(rights.request_verdict(_host(yes), yes), Allow)
    assert not isinstance(rights.request_verdict(_host(no), no), Allow)
    assert not isinstance(rights.verdict("host", _host(yes)), Allow)  # what a process does there is not known


def _host(request: str) -> str:
    return request.partition(" ")[2].partition("/")[0]


def test_a_denied_endpoint_is_denied_on_an_allowed_host() -> None:
    rights = Rights((granted('<read resource="network"/><deny resource="api" endpoint="DELETE /users"/>'),))

    assert isinstance(rights.request_verdict("api.test:443", "GET api.test:443/users"), Allow)
    assert not isinstance(rights.request_verdict("api.test:443", "DELETE api.test:443/users"), Allow)


@pytest.mark.req("K-DI-05")
def test_the_mapping_of_seed_000_grants_its_tools() -> None:
    written: JsonObject = {"tools": ["web_search", "read_web_page"], "read": ["src/**"]}

    assert permission_faults(written) == ()
    assert said_by(written, "x").to_json() == {
        "verbs": {"allow": ["execute.run", "search", "load"]},
        "items": {"allow": ["*/web_search@*", "*/read_web_page@*"]},
        "read": {"allow": ["src/**"]},
    }


@pytest.mark.req("K-DI-05")
@pytest.mark.parametrize("written", [{"tolls": ["a"]}, {"tools": "a"}, {"tools": [1]}, {"tools": ["a@1.0.0"]}])
def test_a_mapping_that_is_not_understood_is_an_issue(written: JsonObject) -> None:
    (issue,) = permission_faults(written)

    assert issue.is_error
    assert issue.place == f"config.permissions.{next(iter(written))}"


def test_what_is_delegated_is_passed_on_and_not_used() -> None:
    written: Json = read('<execute resource="tool" id="a"/><execute delegate="true"><tool>b</tool></execute>')  # type: ignore[assignment]  # JSON, as it was read
    own, passed = Rights((grant_of(written, "x"),)), Rights((delegate_of(written, "x"),))

    assert permission_faults(written) == ()
    for name, is_used in (("a", True), ("b", False)):
        assert isinstance(own.verdict("item", f"project/local/{name}@1.0.0"), Allow) is is_used
        assert isinstance(passed.verdict("item", f"project/local/{name}@1.0.0"), Allow)


@pytest.mark.req("K-DI-05")
def test_a_named_item_uses_what_it_needs_within_what_is_said() -> None:
    silent = Rights((granted("<execute><tool>mail</tool></execute>"),))
    spoken = Rights((granted('<execute resource="tool" id="mail"/><shell commands="curl"/><env vars="KEY"/>'),))

    for kind, resource in (("command", "curl"), ("variable", "KEY"), ("host", "a.test:443"), ("read", "/etc/hosts")):
        assert isinstance(silent.verdict(kind, resource), Allow)  # type: ignore[arg-type]  # kinds
    assert isinstance(spoken.verdict("command", "curl"), Allow)
    assert not isinstance(spoken.verdict("command", "jq"), Allow)
    assert not isinstance(spoken.verdict("variable", "OTHER"), Allow)
    assert isinstance(spoken.verdict("host", "a.test:443"), Allow)
    assert not isinstance(Rights((granted('<shell commands="curl"/>'),)).verdict("host", "a.test:443"), Allow)
