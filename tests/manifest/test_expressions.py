"""Expressions and hooks: their grammar, their values, and what is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.manifest.directive import read_directive
from kiwi_mcp.manifest.expressions import ExpressionFault, compiled, evaluate, is_true
from kiwi_mcp.manifest.hooks import Hook, HookEvent, hook_faults, hooks_in

CONTEXT: JsonObject = {
    "event": {"name": "error", "code": "timeout", "current": 6, "max": 5},
    "directive": {"name": "d", "inputs": {"who": "Ada", "list": [1, {"x": 2}]}},
    "cost": {"turns": 6, "spend": 0.5, "nothing": None},
    "permissions": {"granted": ["a", "b"]},
}


@pytest.mark.req("K-TH-04")
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("cost.turns", 6),
        ("cost.turns > 5 and event.name == 'error'", True),
        ("cost.turns > 6 or event.name == 'limit'", False),
        ("true or false and false", True),
        ("not true or true", True),
        ("not (true or true)", False),
        ("not not 3", True),
        ("not cost.turns == 5", True),
        ("lost.path", None),
        ("cost.turns.deeper", None),
        ("lost < 3", False),
        ("lost >= 3", False),
        ("cost.nothing == null", True),
        ("lost != null", False),
        ("lost + 3", 3),
        ("3 / 0", 0),
        ("2 + 3 * 4 - 6 / 3", 12),
        ("(2 + 3) * -4", -20),
        ("cost.turns-1", 5),
        ("10 - 3 - 2", 5),
        ("event.code in ['timeout', 'limit']", True),
        ("event.code not in ['timeout']", False),
        ("'time' in event.code", True),
        ("'turns' in cost", True),
        ("3 in lost", False),
        ("'a' in permissions.granted", True),
        ("directive.inputs.list.1.x", 2),
        ("directive.inputs.list.7", None),
        ("[1, 'a', [true]]", [1, "a", [True]]),
        ("[]", []),
        ("1 == true", False),
        ("1 == 1.0", True),
        ("'10' < 9", False),
        ("'a' < 'b'", True),
        ("'b' <= 'a'", False),
        ("true > false", False),
        ('"say \\"hi\\""', 'say "hi"'),
        ("'Ada' + '!'", "Ada!"),
    ],
)
def test_an_expression_has_a_value(text: str, value: Json) -> None:
    assert evaluate(compiled(text), CONTEXT) == value


@pytest.mark.req("K-TH-04")
@pytest.mark.parametrize(
    "text",
    [
        "", "  ", "((( ==", "a b", "1 < 2 < 3", "f(1)", "a.b(1)", "'open", "a ==", "== a", "and", "a and", "not", "(a",
        "a)", "[1, 2", "[1 2]", "[,]", "a[0]", "a.", ".a", "{}", "a; b", "a = b", "a if b", "lambda: 1 and",
        "x" * 2_001, "(" * 33 + "1" + ")" * 33, "-" * 40 + "1", "1" + "+1" * 40, "[" * 40 + "]" * 40,
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ExpressionFault):
        compiled(text)


WORDS = ["a", "cost.turns", "1", "'x'", *"()[],<+-*/", "==", "and", "or", "not", "in", "null", "true"]


@given(st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join))
def test_any_text_is_an_expression_or_refused_and_never_fails_with_a_value(text: str) -> None:
    with suppress(ExpressionFault):
        assert is_true(compiled(text), CONTEXT) in {True, False}


def hooks(xml: str) -> tuple[Hook, ...]:
    text = f'<directive name="d" version="1.0.0"><metadata><hooks>{xml}</hooks></metadata></directive>'
    written = as_object(read_directive(text, what="d")["config"])["hooks"]
    assert not list(hook_faults(written))
    return hooks_in(written)


@pytest.mark.req("K-TH-04")
def test_both_forms_of_hooks_are_read() -> None:
    first, second, third = hooks(
        """<hook when="cost.turns &gt; 5" directive="pause"><inputs><input name="why">cost</input></inputs></hook>
<hook event="error"><condition><all><c path="event.code" op="eq" value="timeout" /><c path="cost.turns" op="gte"
  value="6" /></all></condition><action primary="execute" item_type="directive" item_id="repair"><params><param
  name="n">1</param></params></action></hook>
<hook event="limit" action="suspend" />"""
    )

    assert (first.item_id, first.inputs, first.action) == ("pause", {"why": "cost"}, None)
    assert first.events == ("before_step", "after_step", "error", "limit")
    assert (second.item_id, second.item_type, second.inputs, second.events) == (
        "repair", "directive", {"n": "1"}, ("error",),
    )  # fmt: skip
    assert (third.action, third.item_id) == ("suspend", "")
    assert [one.fits("error", CONTEXT) for one in (first, second, third)] == [True, True, False]
    assert [one.fits("after_complete", CONTEXT) for one in (first, second, third)] == [False, False, False]
    assert not second.fits("error", {"event": {"code": "timeout"}})


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"path": "event.code", "op": "eq", "value": "timeout"}, True),
        ({"path": "event.code", "op": "ne", "value": "timeout"}, False),
        ({"path": "cost.turns", "op": "gt", "value": 6}, False),
        ({"path": "cost.turns", "op": "lte", "value": 6}, True),
        ({"path": "lost", "op": "lt", "value": 6}, False),
        ({"path": "event.code", "op": "in", "value": ["timeout"]}, True),
        ({"path": "permissions.granted", "op": "contains", "value": "b"}, True),
        ({"path": "event.code", "op": "regex", "value": "^time"}, True),
        ({"path": "event.code", "op": "regex", "value": "^out"}, False),
        ({"path": "cost.turns", "op": "regex", "value": "6"}, False),
        ({"path": "lost", "op": "exists"}, False),
        ({"path": "lost", "op": "exists", "value": False}, True),
        ({"any": [{"path": "lost", "op": "exists"}, {"path": "cost", "op": "exists"}]}, True),
        ({"not": {"path": "lost", "op": "exists"}}, True),
        ({"all": []}, True),
        ({}, True),
    ],
)
def test_a_condition_as_data_holds_or_not(condition: JsonObject, holds: bool) -> None:
    (hook,) = hooks_in([{"event": "error", "condition": condition, "action": "fail"}])
    event: HookEvent = "error"
    assert hook.fits(event, CONTEXT) is holds


@pytest.mark.req("K-TH-04")
@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ({"when": "((( ==", "directive": "d"}, "config.hooks[0].when"),
        ({"when": "a", "directive": "d", "extra": 1}, "config.hooks[0].extra"),
        ({"event": "sometimes", "directive": "d"}, "config.hooks[0].event"),
        ({"event": "error"}, "config.hooks[0]"),
        ({"directive": "d"}, "config.hooks[0]"),
        ({"event": "error", "action": "shrug"}, "config.hooks[0].action"),
        ({"event": "error", "action": {"primary": "sign", "item_id": "x"}}, "config.hooks[0].action.primary"),
        ({"event": "error", "directive": "d", "condition": {"path": "a", "op": "like"}}, "config.hooks[0].condition"),
        (
            {"event": "error", "directive": "d", "condition": {"path": "a", "op": "regex", "value": "("}},
            "config.hooks[0].condition.value",
        ),
        (
            {"event": "error", "directive": "d", "condition": {"any": [{"path": "a"}]}},
            "config.hooks[0].condition[0]",
        ),
    ],
)
def test_a_broken_hook_is_an_issue_with_its_place(hook: JsonObject, place: str) -> None:
    assert place in [issue.place for issue in hook_faults([hook]) if issue.is_error]
