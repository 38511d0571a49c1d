"""Levels: strictness only grows, whatever is asked and wherever code comes from."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as some

from kiwi_mcp.domain.isolation import LEVELS, Level, strictest
from kiwi_mcp.sandbox.levels import demands, floor, meaning, needed_level, offers

levels = some.sampled_from(LEVELS)
origins = some.sampled_from(["builtin", "owner_pinned", "owner_relaxed", "owner_written", "unknown", "else"])


def rank(level: Level) -> int:
    return LEVELS.index(level)


@given(some.lists(origins, min_size=1), some.lists(levels))
def test_a_chain_is_held_as_strictly_as_its_strictest_part(chain: list[str], asked: list[Level]) -> None:
    held = needed_level(chain, asked)
    assert rank(held) == max([*(rank(floor(origin)) for origin in chain), *(rank(level) for level in asked)])


@given(some.lists(some.one_of(levels, some.text(max_size=12))), some.text(max_size=12))
def test_a_word_that_is_no_level_never_loosens(asked: list[str], word: str) -> None:
    assert rank(strictest([*asked, word])) >= rank(strictest(asked)) or not asked
    assert strictest([]) == "restricted"


def test_origins_have_the_floors_that_are_promised() -> None:
    assert floor("builtin") == "trusted"
    assert floor("owner_written") == floor("model_written") == floor("known_publisher") == "sandboxed"
    assert floor("mcp_server") == "sandboxed"
    assert floor("unknown") == floor("a word nobody knows") == "restricted"


def test_each_level_requires_all_that_the_one_below_does() -> None:
    for laxer, stricter in pairwise(LEVELS):
        assert demands(laxer).requires < demands(stricter).requires


def test_every_property_is_explained_and_every_level_can_be_had() -> None:
    named = {prop for level in LEVELS for prop in demands(level).requires | demands(level).prefers}
    assert all(meaning(prop) != prop for prop in named)
    for level in LEVELS:
        assert any(demands(level).requires <= offer.whole for offer in offers().values()), level
