"""Denied items are found, loaded and reported as denied; missing items are not found."""

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


def test_a_permitted_item_has_no_flag(ask: Ask) -> None:
    assert not any("permitted" in card for card in found(ask).values())
    assert "permitted" not in ask("load", item_id="send_mail").content


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("B6")
def test_a_denied_tool_is_found_with_a_flag_loaded_and_refused(ask: Ask, policy: Path) -> None:
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


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("B6")
@pytest.mark.parametrize(
    ("rule", "is_denied"),
    [
        ("project/local/send_mail", True),
        ("*/send_mail", True),
        ("project/local/send_mail@1.*", True),
        ("project/local/send_mail@2.*", False),
        ("builtin/kiwi/python_runtime", True),
    ],
)
def test_a_rule_without_a_version_covers_all_versions(ask: Ask, policy: Path, rule: str, is_denied: bool) -> None:
    policy.write_text(f"items: {{allow: ['*'], deny: ['{rule}']}}\n")
    assert ("permitted" in found(ask)["send_mail"]) is is_denied
    assert ask("execute", action="why", item_id="send_mail").content["would_run"] is not is_denied
    assert (ask("execute", item_id="send_mail").content.get("code") == "not_permitted") is is_denied
    policy.write_text(f"items: {{allow: ['{rule}']}}\n")
    is_allowed = is_denied and "send_mail" in rule
    assert (ask("execute", item_id="send_mail").content.get("code") != "not_permitted") is is_allowed


@pytest.mark.req("B6")
def test_an_item_on_a_denied_executor_is_flagged(ask: Ask, policy: Path) -> None:
    policy.write_text("items: {allow: ['*'], deny: ['builtin/kiwi/python_runtime@*']}\n")
    assert [card["permitted"] for card in found(ask).values()] == [False, False]
    assert found(ask, source="all", query="run python")["python_runtime"]["permitted"] is False


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("B6")
def test_a_denied_server_flags_all_its_tools(ask: Ask, policy: Path, tmp_path: Path) -> None:
    offers = tmp_path / "offers.json"
    tool = {"name": "post", "description": "Post mail", "inputSchema": {"type": "object"}}
    offers.write_text(json.dumps({"tools": [tool]}))
    args = [str(SCRIPT), str(offers)]
    assert not ask("mcp", action="add", server="outbox", command=sys.executable, args=args).is_error
    policy.write_text("items: {allow: ['*'], deny: ['mcp/outbox/*']}\n")
    assert found(ask)["post"]["permitted"] is False
    assert ask("execute", item_id="mcp/outbox/post").content["code"] == "not_permitted"


@pytest.mark.usefixtures("sandbox")
def test_a_denied_run_of_a_server_names_the_tools_that_may_run(ask: Ask, home: Path, tmp_path: Path) -> None:
    offers = tmp_path / "offers.json"
    names = ("pack", "outbox", "carry", "drop", "empty")
    offers.write_text(json.dumps({"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}))
    args = [str(SCRIPT), str(offers)]
    assert not ask("mcp", action="add", server="outbox", command=sys.executable, args=args).is_error

    assert as_text(ask("execute", item_id="outbox").content["identity"]).startswith("mcp/outbox/outbox@")
    (home / ".ai" / "policy.yaml").write_text("items: {allow: ['*'], deny: ['mcp/outbox/outbox', '*/carry']}\n")
    refused = ask("execute", item_id="outbox").content
    assert refused["code"] == "not_callable"
    why = as_list(ask("execute", action="why", item_id="outbox").content["reasons"])
    assert [as_object(one)["code"] for one in why] == ["not_callable"]
    response = as_text(refused["suggestion"])
    assert "such as `mcp/outbox/drop`, `mcp/outbox/empty`, `mcp/outbox/pack`." in response
    assert "such as" not in as_text(ask("execute", item_id="bash_runtime").content["suggestion"])


def test_an_item_without_an_allowing_rule_is_flagged(ask: Ask, policy: Path) -> None:
    policy.write_text("items: {allow: ['project/local/read_mail@*']}\n")
    cards = found(ask)
    assert (cards["send_mail"]["permitted"], "permitted" in cards["read_mail"]) == (False, False)
    assert "no rule of policy.yaml allows" in as_text(ask("load", item_id="send_mail").content["not_permitted"])


def test_an_unreadable_policy_permits_nothing_and_search_still_answers(ask: Ask, policy: Path) -> None:
    policy.write_text("item: {}\n")
    answer = ask("search", query="mail").content
    assert [as_object(card)["permitted"] for card in as_list(answer["results"])] == [False, False]
    assert "policy.yaml" in as_text(as_list(answer["warnings"])[0])
