"""A lazy pattern does what a compiled one does."""

from __future__ import annotations

import re

import pytest

from kiwi_mcp.domain.patterns import lazy_pattern


def test_a_lazy_pattern_has_the_methods_and_flags_of_a_pattern() -> None:
    lazy = lazy_pattern(r"(\w+)@(\w+)", re.IGNORECASE)
    assert lazy.fullmatch("a@b") is not None
    assert lazy.fullmatch("a@") is None
    assert lazy.sub(r"\2", "x@y") == "y"
    assert (lazy.pattern, lazy.groups) == (r"(\w+)@(\w+)", 2)


def test_a_lazy_pattern_is_compiled_at_its_first_use() -> None:
    lazy = lazy_pattern("(")
    with pytest.raises(re.error):
        lazy.search("")
