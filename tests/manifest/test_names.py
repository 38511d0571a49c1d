"""The rule for names and paths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.names import is_safe_path, is_tool_id
from kiwi_mcp.manifest.names import did_you_mean


@pytest.mark.case("PATH-01")
@pytest.mark.parametrize(
    "text",
    ["../x", "a/b", "", ".", "..", "con", "nul", "aux", "com1", "lpt9", "a" * 300, "a\0", "Upper", "_a", "a b", "a\n"],
)
def test_invalid_item_names_are_refused(text: str) -> None:
    assert not is_tool_id(text)


@pytest.mark.case("UNI-01")
@pytest.mark.parametrize("text", ["\uff52eader", "\ufb01le", "a\u0301b", "\u0440\u0430ypal", "a\u200bb", "\u0661"])
def test_names_are_ascii(text: str) -> None:
    assert not is_tool_id(text)


@pytest.mark.parametrize("text", ["a", "email_enricher", "my-tool", "0a", "a" * 128, "console", "com10"])
def test_valid_item_names_are_accepted(text: str) -> None:
    assert is_tool_id(text)


@pytest.mark.case("PATH-02")
@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "C:/x", "C:x", "\\\\server\\x", "a\\b", "~/x", "~root", "../x", "a/../b", "a/./b", ".", "", "a/",
     "a//b", "x.", "x ", "a./b", "a\nb", "a\0", "a\x7f", "lib/con", "nul.txt", "/".join("a" * 17), "a" * 256],
)  # fmt: skip
def test_unsafe_paths_are_refused(path: str) -> None:
    assert not is_safe_path(path)


@pytest.mark.parametrize("path", ["main.py", "lib/clearbit.py", ".env.example", "a b/c.txt", "données/é.md", "[id].js"])
def test_plain_relative_paths_are_fine(path: str) -> None:
    assert is_safe_path(path)


@given(path=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_safe_path_never_leaves_its_folder(path: str) -> None:
    if is_safe_path(path):
        assert ".." not in path.split("/")
        assert not path.startswith(("/", "~"))
        assert "\\" not in path


def test_the_nearest_name_is_suggested_regardless_of_case() -> None:
    assert did_you_mean("get", ["GET", "POST"]) == "Did you mean `GET`? "
    assert did_you_mean("zzz", ["GET", "POST"]) == ""
