"""Semantic versions, their order, and ranges of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.names import Range, Version

# The order that semver.org gives.
ORDER = [
    "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-beta.2", "1.0.0-beta.11", "1.0.0-rc.1",
    "1.0.0", "1.0.1", "1.2.0", "1.10.0", "2.0.0",
]  # fmt: skip
numbers = st.integers(0, 30)
versions = st.builds(Version, numbers, numbers, numbers)


def version(text: str) -> Version:
    parsed = Version.parse(text)
    assert parsed is not None, text
    return parsed


def covers(range_: str, text: str) -> bool:
    parsed = Range.parse(range_)
    assert parsed is not None, range_
    return parsed.covers(version(text))


def test_versions_are_ordered_as_the_specification_says() -> None:
    assert sorted(map(version, reversed(ORDER))) == list(map(version, ORDER))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1.0",
        "01.0.0",
        "1.0.0.0",
        "v1.0.0",
        "1.0.0-",
        "1.0.0-a..b",
        " 1.0.0",
        "1.0.0\n",
        "a.b.c",
        "\u0661.\u0660.\u0660",
    ],
)
def test_an_invalid_version_is_none(text: str) -> None:
    assert Version.parse(text) is None


def test_build_metadata_does_not_count() -> None:
    assert version("1.0.0+build.1") == version("1.0.0+build.2")


@pytest.mark.req("K-CH-04")
@pytest.mark.parametrize(
    ("range_", "inside", "outside"),
    [
        ("^1.2", ["1.2.0", "1.9.9"], ["1.1.9", "2.0.0", "2.0.0-rc.1"]),
        ("^0.2.3", ["0.2.3", "0.2.9"], ["0.3.0", "0.2.2"]),
        ("^0.0.3", ["0.0.3"], ["0.0.4"]),
        ("^0", ["0.0.1", "0.9.0"], ["1.0.0"]),
        ("~1.2.3", ["1.2.3", "1.2.9"], ["1.3.0"]),
        ("~1", ["1.0.0", "1.9.0"], ["2.0.0"]),
        (">=1,<2", ["1.0.0", "1.9.9"], ["0.9.0", "2.0.0"]),
        (">= 1.2 < 2", ["1.2.0"], ["1.1.0", "2.0.0"]),
        (">1.2.3", ["1.2.4"], ["1.2.3"]),
        ("<=1.2.3", ["1.2.3", "0.1.0"], ["1.2.4"]),
        ("1.x", ["1.0.0", "1.9.0"], ["2.0.0"]),
        ("1.2.*", ["1.2.7"], ["1.3.0"]),
        ("*", ["0.0.1", "9.9.9"], ["1.0.0-rc.1"]),
        ("1.2.3", ["1.2.3"], ["1.2.4", "1.2.3-rc.1"]),
        ("=1.2.3", ["1.2.3"], ["1.2.2"]),
        ("1.2", ["1.2.0", "1.2.9"], ["1.3.0"]),
        (">=1.0.0-rc.1", ["1.0.0-rc.2", "1.0.0", "1.1.0"], ["1.0.0-beta", "1.1.0-rc.1"]),
    ],
)
def test_a_range_covers_the_versions_it_names(range_: str, inside: list[str], outside: list[str]) -> None:
    assert [text for text in inside if not covers(range_, text)] == []
    assert [text for text in outside if covers(range_, text)] == []


@pytest.mark.parametrize("text", ["", "  ", "one", "^", "1.2.3.4", ">=", "^1 || ^2", "latest", "1..2"])
def test_an_invalid_range_is_none(text: str) -> None:
    assert Range.parse(text) is None


@given(one=versions, other=versions)
def test_of_two_versions_exactly_one_is_smaller_unless_they_are_equal(one: Version, other: Version) -> None:
    assert (one < other) + (other < one) + (one == other) == 1


@given(versions)
def test_a_version_is_covered_by_itself_and_by_compatible_ranges(one: Version) -> None:
    assert Version.parse(str(one)) == one
    for range_ in (str(one), f"={one}", f"^{one}", f"~{one}", f">={one}", f"<={one}", "*"):
        assert covers(range_, str(one))
    for range_ in (f">{one}", f"<{one}"):
        assert not covers(range_, str(one))


@given(st.text(max_size=30))
def test_any_text_is_a_version_or_none_and_a_range_or_none(text: str) -> None:
    assert Version.parse(text) is None or str(version(text)) == text.partition("+")[0]
    assert Range.parse(text) is None or isinstance(Range.parse(text), Range)
