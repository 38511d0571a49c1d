"""The error family: one shape, stable codes, and a suggestion in every error."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kiwi_mcp.domain import errors
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError, ToolNotFound, VariableMissing, listing
from kiwi_mcp.domain.issues import Issue


def family(root: type[KiwiError] = KiwiError) -> Iterator[type[KiwiError]]:
    for child in root.__subclasses__():
        yield child
        yield from family(child)


MEMBERS = [member for member in family() if member.__module__ == errors.__name__]


@pytest.mark.req("K-ME-03")
def test_every_error_has_a_code_a_title_and_an_exit_code_of_its_own() -> None:
    codes = [member.code for member in MEMBERS]

    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)
    assert all(member.error and 0 < member.exit_code < 128 and member.http_status >= 400 for member in MEMBERS)


def test_the_tree_at_the_top_of_the_module_matches_the_classes() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")

    assert drawn == [member.__name__ for member in MEMBERS]


@pytest.mark.req("K-ME-03")
def test_every_refusal_has_the_same_first_keys() -> None:
    response = ToolNotFound("lost", near=["last"]).to_response("tool")

    assert list(response)[:5] == ["error", "code", "item_type", "message", "suggestion"]
    assert response["tool_id"] == "lost"
    assert "`last`" in str(response["suggestion"])
    assert VariableMissing(["A", "B"], needed_by="x").to_response()["variables"] == ["A", "B"]


def test_a_long_list_of_issues_is_shortened_in_the_message_and_complete_in_the_details() -> None:
    issues = [Issue(f"p{number}", "is wrong", "Fix it.") for number in range(12)]

    refused = InvalidManifest("It", issues)

    assert refused.message.endswith("p9: is wrong; and 2 more.")
    assert len(refused.issues) == 12
    assert listing("It has", issues[:1]) == "It has 1 issue: p0: is wrong."
