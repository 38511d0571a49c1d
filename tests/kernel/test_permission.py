"""What the owner denies is seen, read and spoken of as denied; what is not there is not found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer

SCRIPT = Path(__file__).parents[1] / "data" / "mcp" / "scripted.py"
Ask = Callable[..., Answer]


@pytest.fixture(autouse=True)
def tools(project: Path) -> None:
    folder = project / ".ai" / "tools"
    folder.mkdir()
    for name in ("send_mail", "read_mail"):
        head = (
            f'"""Mail: {name}"""\n__version__ = "1.0.0"\n__tool_type__ = "script"\n__executor_id__ = "python_runtime"\n'
        )
        (folder / f"{name}.py").write_text(f"{head}\n\ndef main():\n    return 1\n")


@pytest.fixture
def policy(home: Path) -> Path:
    (home / ".ai").mkdir()
    return home / ".ai" / "policy.yaml"


def found(ask: Ask, query: str = "mail", **words: str) -> dict[str, JsonObject]:
    cards = map(as_object, as_list(ask("search", query=query, **words).content["results"]))
    return {as_text(card["name"]): card for card in cards}


def test_what_is_permitted_bears_no_flag(ask: Ask) -> None:
    assert not any("permitted" in card for card in found(ask).values())
    assert "permitted" not in ask("load", item_id="send_mail").content


@pytest.mark.req("B6")
def test_a_denied_tool_is_found_flagged_read_and_refused_and_an_unknown_one_is_not_found(
    ask: Ask, policy: Path
) -> None:
    policy.write_text("items: {allow: ['*'], deny: ['*/send_mail@*']}\n")
    cards = found(ask)
    assert cards["send_mail"]["permitted"] is False
    assert "permitted" not in cards["read_mail"]
    loaded = ask("load", item_id="send_mail").content
    assert loaded["permitted"] is False
    assert "'*/send_mail@*'" in as_text(loaded["not_permitted"])
    assert ask("execute", item_id="send_mail").content["code"] == "not_permitted"
    assert ask("execute", item_id="send_post").content["code"] == "tool_not_found"
    assert ask("execute", item_id="read_mail").content["result"] == 1


@pytest.mark.req("B6")
def test_what_stands_on_something_denied_is_flagged_as_well(ask: Ask, policy: Path) -> None:
    policy.write_text("items: {allow: ['*'], deny: ['builtin/kiwi/python_runtime@*']}\n")
    assert [card["permitted"] for card in found(ask).values()] == [False, False]
    assert found(ask, source="all", query="run python")["python_runtime"]["permitted"] is False


@pytest.mark.req("B6")
def test_a_denied_server_flags_all_that_it_offers(ask: Ask, policy: Path, tmp_path: Path) -> None:
    offers = tmp_path / "offers.json"
    tool = {"name": "post", "description": "Post mail", "inputSchema": {"type": "object"}}
    offers.write_text(json.dumps({"tools": [tool]}))
    args = [str(SCRIPT), str(offers)]
    assert not ask("mcp", action="add", server="outbox", command=sys.executable, args=args).is_error
    policy.write_text("items: {allow: ['*'], deny: ['mcp/outbox/*']}\n")
    assert found(ask)["post"]["permitted"] is False
    assert ask("execute", item_id="mcp/outbox/post").content["code"] == "not_permitted"


def test_what_no_rule_allows_is_flagged(ask: Ask, policy: Path) -> None:
    policy.write_text("items: {allow: ['project/local/read_mail@*']}\n")
    cards = found(ask)
    assert (cards["send_mail"]["permitted"], "permitted" in cards["read_mail"]) == (False, False)
    assert "no rule of policy.yaml allows" in as_text(ask("load", item_id="send_mail").content["not_permitted"])


def test_a_policy_that_cannot_be_read_permits_nothing_and_search_still_answers(ask: Ask, policy: Path) -> None:
    policy.write_text("item: {}\n")
    answer = ask("search", query="mail").content
    assert [as_object(card)["permitted"] for card in as_list(answer["results"])] == [False, False]
    assert "policy.yaml" in as_text(as_list(answer["warnings"])[0])
