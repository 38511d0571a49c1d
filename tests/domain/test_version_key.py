"""Version keys: text that any database sorts in version order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.names import Version

numbers = st.one_of(st.integers(0, 12), st.integers(0, 10**80))
words = st.from_regex(r"[0-9A-Za-z-]{0,3}[A-Za-z-]", fullmatch=True)
parts = st.one_of(numbers.map(str), words)
versions = st.builds(Version, numbers, numbers, numbers, st.lists(parts, max_size=4).map(tuple))
near = st.tuples(versions, st.lists(parts, max_size=2)).map(
    lambda pair: (pair[0], Version(pair[0].major, pair[0].minor, pair[0].patch, (*pair[0].pre, *pair[1])))
)


@pytest.mark.slow
@given(st.one_of(near, st.tuples(versions, versions)))
@settings(deadline=None, max_examples=120)
def test_keys_have_the_order_of_their_versions(pair: tuple[Version, Version]) -> None:
    one, other = pair
    assert (one.key.encode() < other.key.encode()) == (one < other)
    assert (one.key == other.key) == (one == other)


@given(versions)
@settings(deadline=None)
def test_a_key_is_plain_ascii(version: Version) -> None:
    assert version.key.isascii()
    assert version.key.isprintable()


def test_a_version_that_semver_forbids_is_none() -> None:
    for text in ("1.0.0-01", "1.0.0-a.00", "1\u0661.0.0", f"{'9' * 5_000}.0.0"):
        assert Version.parse(text) is None
    assert Version.parse("1.0.0-0a.0") is not None
