"""Permissions of directives: what they grant, and that a misspelt one is refused."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.grants import Allow, Grant, ResourceKind, Rights, Rules, narrow
from kiwi_mcp.domain.json import as_object
from kiwi_mcp.manifest.directive import read_directive
from kiwi_mcp.manifest.permissions import grant_of, permission_faults

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
@pytest.mark.parametrize("permissions", ["", '<execute resource="tool" tool_type="bash"/>'])
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
    ],
)
def test_a_misspelt_permission_is_an_issue_with_a_fix(permissions: str) -> None:
    found = permission_faults(read(permissions))  # type: ignore[arg-type]  # JSON, as it was read

    assert found
    assert all(issue.is_error and issue.fix and issue.place == "config.permissions[0]" for issue in found)
