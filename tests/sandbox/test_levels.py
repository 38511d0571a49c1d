"""Isolation levels: strictness only grows, for any request and origin."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as some

from kiwi_mcp.domain.isolation import LEVELS, Level, strictest
from kiwi_mcp.sandbox.levels import demands, floor, meaning, offers

levels = some.sampled_from(LEVELS)
origins = some.sampled_from(["builtin", "owner_pinned", "owner_relaxed", "owner_written", "unknown", "else"])


def rank(level: Level) -> int:
    return LEVELS.index(level)


@given(some.lists(some.one_of(levels, some.text(max_size=12))), some.text(max_size=12))
def test_an_unknown_level_never_loosens(asked: list[str], word: str) -> None:
    assert rank(strictest([*asked, word])) >= rank(strictest(asked)) or not asked
    assert strictest([]) == "restricted"


def test_origins_have_the_documented_minimum_levels() -> None:
    assert floor("builtin") == "trusted"
    assert floor("owner_written") == floor("model_written") == floor("known_publisher") == "sandboxed"
    assert floor("mcp_server") == "sandboxed"
    assert floor("unknown") == floor("an unknown origin") == "restricted"


def test_each_level_includes_the_requirements_of_the_one_below() -> None:
    for laxer, stricter in pairwise(LEVELS):
        assert demands(laxer).requires < demands(stricter).requires


def test_every_property_is_explained_and_every_level_is_available() -> None:
    named = {prop for level in LEVELS for prop in demands(level).requires | demands(level).prefers}
    assert all(meaning(prop) != prop for prop in named)
    for level in LEVELS:
        assert any(demands(level).requires <= offer.provides | offer.proves for offer in offers().values()), level
