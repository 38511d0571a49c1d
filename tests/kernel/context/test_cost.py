"""The token estimate, compared with seven tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.token_cost import ERROR, TokenCost, cost_of, cost_of_json, total

DEFINITION = (
    '{"name":"create_issue","description":"Open an issue in a repository, with labels and people to look at it. Needs '
    'the right to write there.","inputSchema":{"type":"object","properties":{"owner":{"type":"string","description":'
    '"Account that the repository belongs to"},"repo":{"type":"string"},"title":{"type":"string","maxLength":256},'
    '"labels":{"type":"array","items":{"type":"string"}},"dryRun":{"type":"boolean","default":false}},"required":'
    '["owner","repo","title"],"additionalProperties":false}}'
)
ANSWER = (
    '{"results":[{"name":"send_mail","description":"Send a message to one or several people","source":"mcp","score":'
    '0.8731,"tool_type":"mcp_tool","identity":"mcp/post/send_mail@1.0.0","why":["name: send mail"]},{"name":'
    '"list_invoices","description":"List the invoices of a customer, the newest first","source":"project","score":'
    '0.4412,"tool_type":"script","identity":"project/local/list_invoices@2.1.0","why":["description: customer"]}],'
    '"total":2,"query":"mail an invoice to a customer","source":"local"}'
)
PROSE = (
    "A client shows every tool it knows to the model, in every conversation. Twenty servers with twenty tools each are "
    "a book that is read before the first word is said. Kiwi shows four tools; everything else is found by `search` "
    "when it is needed."
)
CODE = (
    "def conversations(calls):\n    found = []\n    for call in sorted(calls, key=lambda one: one.started_at):\n"
    "        if not found or call.started_at - found[-1].ended_at > timedelta(minutes=30):\n"
    "            found.append(Conversation(call))\n        found[-1].extend(call)\n    return found\n"
)
NUMBERS = (
    '[{"id":40317,"lat":48.20849,"lon":16.37208,"at":"2026-03-14T09:26:53.589Z","price":1249.5},'
    '{"id":7,"lat":-33.86882,"lon":151.20929,"at":"2026-03-15T00:00:00.000Z","price":19.99}]'
)
GERMAN = (
    "Das Programm durchsucht die Werkzeuge, die auf diesem Rechner vorhanden sind, und zeigt für jedes eine kurze "
    "Beschreibung. Größere Ergebnisse werden in einer Datei abgelegt, aus der sie später gelesen werden können."
)
CHINESE = (
    "该程序在已安装的工具中搜索,并为每个工具显示简短的说明。选择其中一个以查看其参数,然后运行它。"
    "较大的结果会保存在文件中,以后可以通过键读取。"
)
COUNTED = [
    (DEFINITION, 112.3),
    (ANSWER, 136.9),
    (PROSE, 52.9),
    (CODE, 67.9),
    (NUMBERS, 100.4),
    (GERMAN, 51.7),
]
"""Texts, and their tokens by cl100k, o200k, Claude 2, Llama 3 and 4, Qwen and Tekken, on average."""


@pytest.mark.parametrize(("text", "tokens"), COUNTED)
def test_tokens_are_within_a_tenth_of_what_tokenizers_count(text: str, tokens: float) -> None:
    assert abs(cost_of(text).tokens / tokens - 1) < ERROR


def test_characters_of_other_alphabets_count_by_their_bytes() -> None:
    assert cost_of(CHINESE).tokens == pytest.approx(50, rel=1 / 3)


def test_nothing_costs_nothing_and_everything_else_at_least_one_token() -> None:
    assert cost_of("") == TokenCost(0, 0)
    assert cost_of(" ") == TokenCost(1, 1)
    assert cost_of("\ud800") == TokenCost(1, 1)
    assert cost_of_json({"a": 1}) == cost_of('{"a":1}')
    assert total(()) == TokenCost()
    assert total([TokenCost(3, 1), TokenCost(4, 2)]) == TokenCost(7, 3)


@given(st.text(max_size=400), st.text(max_size=400))
def test_more_text_never_costs_less(first: str, second: str) -> None:
    both = cost_of(first + " " + second)
    assert both.tokens >= max(cost_of(first).tokens, cost_of(second).tokens)
    assert both.bytes == len((first + " " + second).encode(errors="replace"))


@pytest.mark.parametrize("text", [DEFINITION, PROSE, CODE, NUMBERS])
def test_a_long_text_is_estimated_from_samples(text: str) -> None:
    whole = cost_of(text * 400)
    assert whole.bytes == 400 * len(text)
    assert whole.tokens == pytest.approx(400 * cost_of(text).tokens, rel=0.02)
