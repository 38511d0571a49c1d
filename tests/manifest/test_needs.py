"""Valid and invalid needs of an item."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.json import Json
from kiwi_mcp.manifest.check import needs_faults
from kiwi_mcp.manifest.type_specs import load_type_specs

SHEETS = load_type_specs()


def places(needs: Json, tool_type: str = "script") -> list[str]:
    found = list(needs_faults(needs, tool_type, SHEETS))
    assert all(issue.fix for issue in found)
    return [issue.place for issue in found]


@pytest.mark.parametrize(
    "needs",
    [
        {},
        {"read": ["docs", "docs/**", ".", "**", "~/notes", "/srv/data", "a b"], "write": ["out/"]},
        {
            "hosts": [
                "api.test",
                "api.test:8443",
                "*.api.test",
                "10.0.0.7",
                "10.0.0.7:80",
                "::1",
                "[::1]:80",
                "localhost",
            ]
        },
        {"commands": ["git", "python3.11", "g++"]},
    ],
)
def test_valid_needs_are_accepted(needs: Json) -> None:
    assert places(needs) == []
    assert places(needs, "runtime") == places(needs, "mcp_server") == []


@pytest.mark.parametrize(
    ("needs", "place"),
    [
        (["docs"], "needs"),
        ({"reads": ["docs"]}, "needs.reads"),
        ({"read": "docs"}, "needs.read"),
        ({"read": [1]}, "needs.read"),
        *(
            ({"read": [path]}, "needs.read")
            for path in ("", "../x", "/", "/etc", "/home/", "~", "~/", "~root/x", "*.md")
        ),
        ({"write": ["docs/**/x"]}, "needs.write"),
        *(({"hosts": [host]}, "needs.hosts") for host in ("", "http://a.test", "a.test/x", "a b", "-a.test", "a..b")),
        *(({"commands": [name]}, "needs.commands") for name in ("", "/bin/sh", "rm -rf", "a;b")),
        ({"read": ["a"] * 101}, "needs.read"),
    ],
)
def test_invalid_needs_are_reported_with_their_place(needs: Json, place: str) -> None:
    assert places(needs) == [place]


@pytest.mark.parametrize("tool_type", ["api", "knowledge", "directive", "mcp_tool"])
def test_only_processes_have_needs(tool_type: str) -> None:
    assert places({"read": ["docs"]}, tool_type) == ["needs"]


@pytest.mark.case("TR-F06")
def test_only_an_mcp_server_may_declare_client_requests() -> None:
    assert places({"client": ["roots", "sampling", "questions"]}, "mcp_server") == []
    assert places({"client": ["root"]}, "mcp_server") == ["needs.client"]
    assert places({"client": ["roots"]}, "script") == ["needs.client"]
    assert places({"client": ["roots"]}, "runtime") == ["needs.client"]
