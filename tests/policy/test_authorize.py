"""The gates between a plan and its effects."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.errors import IntegrityMismatch, LockMismatch
from kiwi_mcp.domain.grants import Allow, Deny, Grant, Rights, Rules, narrow
from kiwi_mcp.domain.items import Chain, Location, Manifest, Signature, Tool, TypeTraits
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec, ReadSpec
from kiwi_mcp.policy.authorize import authorize, permit, verify

TOOL = Tool(Manifest("say", "api", "1.0.0"), Location("project", Path("say.yaml"), Path()), digest="d" * 64)
PLAN = Plan("project/local/say@1.0.0", "d" * 64, "http", (), HttpSpec("GET", "https://a.example.com:8443/x"), {})


def test_a_changed_link_refuses_the_chain_in_any_position() -> None:
    changed = replace(TOOL, integrity="modified", signature=Signature("", "e" * 64))

    for links in ((changed, TOOL), (TOOL, changed)):
        with pytest.raises(IntegrityMismatch) as refused:
            verify(Chain(links, (TypeTraits("http"),) * len(links)), (), (), is_frozen=False)
        assert (refused.value.details["expected"], refused.value.details["actual"]) == ("e" * 64, "d" * 64)


@pytest.mark.parametrize("integrity", ["unsigned", "signed", "hashed", "valid:B2", "legacy-unverifiable"])
def test_an_unchanged_link_passes(integrity: str) -> None:
    chain = Chain((replace(TOOL, integrity=integrity),), (TypeTraits("http"),), shadowed=("a hides b",))

    assert verify(chain, (), (), is_frozen=True) == ("a hides b",)


def test_a_difference_from_the_lockfile_warns_and_is_refused_with_frozen() -> None:
    chain = Chain((TOOL,), (TypeTraits("http"),))

    assert verify(chain, ("say changed",), (), is_frozen=False) == ("lockfile: say changed",)
    with pytest.raises(LockMismatch, match="say changed"):
        verify(chain, ("say changed",), (), is_frozen=True)


@pytest.mark.parametrize(
    ("items", "hosts", "rule"),
    [
        (Rules(allow=("*",)), Rules(), None),
        (Rules(allow=("project/*",)), Rules(), None),
        (Rules(), Rules(), ""),
        (Rules(allow=("user/*",)), Rules(), ""),
        (Rules(allow=("*",), deny=("*/say@*",)), Rules(), "*/say@*"),
        (Rules(allow=("*",)), Rules(deny=("*.example.com",)), "*.example.com"),
        (Rules(allow=("*",)), Rules(allow=("a.example.com",), deny=("*",)), "*"),
        (Rules(allow=("*",)), Rules(allow=("other.example.com",)), None),
    ],
)
def test_deny_wins_and_the_default_is_deny(items: Rules, hosts: Rules, rule: str | None) -> None:
    verdict = authorize(PLAN, Rights((Grant(items, hosts),)))

    assert verdict == Allow() if rule is None else isinstance(verdict, Deny) and verdict.rule == rule


def test_granted_hosts_are_written_into_the_request() -> None:
    rights = Rights((Grant(hosts=Rules(allow=("127.0.0.1:80",), deny=("evil.test",))),))
    spec = permit(PLAN, rights).spec
    read = replace(PLAN, spec=ReadSpec("a.md", "0" * 64))

    assert isinstance(spec, HttpSpec)
    assert (spec.granted, spec.denied) == (("127.0.0.1:80",), ("evil.test",))
    assert permit(read, rights) == read


def test_a_caller_with_a_host_list_reaches_no_other_host_and_follows_no_redirect() -> None:
    listed = narrow(Rights(), Grant(hosts=Rules(allow=("a.example.com",)), is_public=False))
    other = narrow(Rights(), Grant(hosts=Rules(allow=("b.example.com",)), is_public=False))
    spec = permit(PLAN, listed).spec

    assert authorize(PLAN, listed) == Allow()
    assert isinstance(authorize(PLAN, other), Deny)
    assert isinstance(spec, HttpSpec)
    assert (spec.max_redirects, spec.granted) == (0, ())


def test_programs_and_variables_are_checked_against_the_rules() -> None:
    process = replace(PLAN, spec=ProcessSpec(("/usr/bin/bash", "x.sh"), cwd="/"), variables=("API_KEY",))

    assert authorize(process, Rights()) == Allow()
    assert isinstance(authorize(process, Rights((Grant(commands=Rules(("*",), ("bash",))),))), Deny)
    assert isinstance(authorize(process, Rights((Grant(variables=Rules(("OTHER",))),))), Deny)


names = st.text("ab/*@.", max_size=6)


@given(name=names, allow=st.lists(names), deny=st.lists(names))
def test_an_additional_denying_rule_never_allows_more(name: str, allow: list[str], deny: list[str]) -> None:
    without = Rules(tuple(allow), ()).match(name)
    with_denials = Rules(tuple(allow), tuple(deny)).match(name)

    assert with_denials is not None or without is None
    assert Rules(tuple(allow), (name,)).match(name) is not None or "*" in name
