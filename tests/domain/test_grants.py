"""Grants: rules only narrow, their order does not matter, and a denying rule always wins."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import permutations
from timeit import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.grants import (
    KINDS,
    Allow,
    Deny,
    Grant,
    ResourceKind,
    Rights,
    Rules,
    empty_grant,
    fits_host,
    fits_item,
    fits_name,
    fits_path,
    fits_verb,
    narrow,
)

words = st.sampled_from(
    ["a", "b", "a/b", "a/b/c", "*", "**", "a/*", "*/b", "a/**", "**/c", "/a", "/a/**", "a.b", "*.b"]
)
rules = st.builds(Rules, st.lists(words, max_size=3).map(tuple), st.lists(words, max_size=3).map(tuple))
grants = st.builds(
    Grant, rules, rules, rules, rules, rules, rules, rules, rules, is_public=st.booleans(), name=st.just("ben")
)
rights = st.lists(grants, min_size=1, max_size=3).map(lambda found: Rights(tuple(found)))
kinds = st.sampled_from(KINDS)
quick = settings(max_examples=50, deadline=None)


def about_all(one: Rules) -> Grant:
    return Grant(one, one, one, one, one, one, one, one)


def is_allowed(held: Rights, kind: ResourceKind, resource: str) -> bool:
    return isinstance(held.verdict(kind, resource), Allow)


@pytest.mark.slow
@quick
@given(parent=rights, wanted=grants, kind=kinds, resource=words)
@pytest.mark.req("N3")
@pytest.mark.case("PERM-01", "PERM-02")
def test_a_child_never_has_more_rights_than_its_parent(
    parent: Rights, wanted: Grant, kind: ResourceKind, resource: str
) -> None:
    child = narrow(parent, wanted)

    assert not is_allowed(child, kind, resource) or is_allowed(parent, kind, resource)
    assert set(child.hosts.allow) <= set(parent.hosts.allow)
    assert set(child.hosts.deny) >= set(parent.hosts.deny)


@quick
@given(held=rights, kind=kinds, resource=words)
def test_a_child_that_asks_for_everything_has_what_its_parent_has(
    held: Rights, kind: ResourceKind, resource: str
) -> None:
    everything = Rules(("*", "**", "/**"))
    child = narrow(held, about_all(everything))

    assert is_allowed(child, kind, resource) == is_allowed(held, kind, resource)


@quick
@given(held=rights, kind=kinds, resource=words)
def test_a_child_without_permissions_may_do_nothing(held: Rights, kind: ResourceKind, resource: str) -> None:
    assert not is_allowed(narrow(held, empty_grant("a directive")), kind, resource)


@pytest.mark.slow
@quick
@given(found=st.lists(grants, min_size=2, max_size=3), kind=kinds, resource=words)
@pytest.mark.req("N3")
def test_the_order_of_grants_and_rules_never_matters(found: list[Grant], kind: ResourceKind, resource: str) -> None:
    assert len({is_allowed(Rights(order), kind, resource) for order in permutations(found)}) == 1
    first = found[0].rules(kind)
    turned = Rules(first.allow[::-1], first.deny[::-1])
    assert (first.match(resource, kind) is None) == (turned.match(resource, kind) is None)


@quick
@given(held=rights, kind=kinds, resource=words, place=st.integers(0, 2), allow=st.lists(words))
@pytest.mark.req("N3")
def test_a_denying_rule_wins_in_any_position(
    held: Rights, kind: ResourceKind, resource: str, place: int, allow: list[str]
) -> None:
    denying = Rules((*allow, resource), (resource,))
    among = (*held.grants[:place], about_all(denying), *held.grants[place:])

    verdict = Rights(among).verdict(kind, resource)
    assert isinstance(verdict, Deny)


def test_a_verdict_names_the_owner_of_the_rule() -> None:
    held = narrow(Rights(), Grant(items=Rules(("*",), ("*/rm@*",)), name="policy.yaml for bob"))

    assert held.verdict("item", "user/local/rm@1.0.0") == Deny(
        "the item 'user/local/rm@1.0.0' is denied by the rule '*/rm@*' of policy.yaml for bob",
        "*/rm@*",
        "policy.yaml for bob",
    )
    assert held.verdict("item", "user/local/ls@1.0.0") == Allow("policy.yaml for bob", "*")
    with pytest.raises(ValueError, match="grant"):
        Rights(())


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("docs", "docs", True),
        ("docs", "docs/a/b.md", True),
        ("docs", "docs2", False),
        ("docs/**", "docs", True),
        ("docs/**", "docsy/a", False),
        ("docs/*.md", "docs/a.md", True),
        ("docs/*.md", "docs/a/b.md", False),
        ("**/.env", "a/b/.env", True),
        ("**/.env", ".env", True),
        ("**/.env", "a/.env.d", False),
        ("**/a/**/b", "x/a/y/z/b", True),
        ("**/a/**/b", "x/a/y/z/c", False),
        ("/srv/[ab]", "/srv/a/x", True),
        ("/srv/*", "srv/a", False),
        ("*", "/srv", False),
        ("a?c", "abc", True),
        ("**", "any/thing", True),
        ("**/" * 40 + "x", "a/" * 60 + "b", False),
    ],
)
def test_paths_are_compared_name_by_name(pattern: str, path: str, fits: bool) -> None:
    assert fits_path(pattern, path) is fits


@pytest.mark.parametrize(
    ("pattern", "host", "fits"),
    [
        ("a.test", "a.test", True),
        ("a.test", "a.test:8443", True),
        ("a.test:443", "a.test:8443", False),
        ("a.test:443", "a.test", False),
        ("*.test", "a.test:80", True),
        ("*.test", "test", False),
        ("*.test", "*.a.test", True),
        ("a.test", "*.test", False),
        ("?", "*", False),
        ("*", "a.test", True),
        ("::1", "[0:0::1]:80", True),
        ("*.1", "10.0.0.1", False),
        ("A.Test.", "a.test", True),
    ],
)
def test_hosts_match_by_name_and_port_and_never_by_part_of_a_name(pattern: str, host: str, fits: bool) -> None:
    assert fits_host(pattern, host) is fits


@quick
@given(pattern=st.text("ab*?[]!-/", max_size=7), name=st.text("ab[]!-/", max_size=6))
def test_names_match_like_shell_patterns(pattern: str, name: str) -> None:
    assert fits_name(pattern, name) is fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("mcp/time/now", True),
        ("mcp/time/n*", True),
        ("*/now", True),
        ("mcp/time/now@*", True),
        ("mcp/time/now@1.2.0", True),
        ("mcp/time/now@1.3.0", False),
        ("*/now@2.*", False),
        ("mcp/time/no", False),
        ("now", False),
        ("*", True),
    ],
)
def test_a_pattern_without_a_version_covers_every_version_of_an_item(pattern: str, fits: bool) -> None:
    identity = "mcp/time/now@1.2.0"
    assert fits_item(pattern, identity) is fits
    assert fits_item(pattern, f"{identity}@odd") is (fits and pattern != "mcp/time/now@1.2.0")
    assert isinstance(Grant(Rules(allow=(pattern,))).verdict("item", identity), Allow) is fits
    assert isinstance(Grant(Rules(("*",), (pattern,))).verdict("item", identity), Deny) is fits
    assert isinstance(Rights((Grant(), Grant(Rules((pattern,))))).item_verdict([identity]), Allow) is fits


def test_a_verb_covers_all_its_actions() -> None:
    assert fits_verb("execute", "execute.create")
    assert not fits_verb("execute.create", "execute")


def test_a_decision_takes_less_than_20_microseconds() -> None:
    held = narrow(Rights(), Grant(items=Rules(("project/*", "user/*"), ("*/rm@*", "mcp/mail/*"))))
    names = [f"project/local/tool_{number}@1.0.0" for number in range(500)]
    fastest = min(timeit(lambda: [held.verdict("item", name) for name in names], number=1) for _ in range(5))

    assert fastest / len(names) < 20e-6
