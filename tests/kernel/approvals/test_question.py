"""Approval questions: correct, bounded, and safe against injected text."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from unicodedata import category

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.items import Chain, Location, Manifest, Tool, TypeTraits
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.domain.records import Approval, Effects
from kiwi_mcp.kernel.approvals import escaped, in_words, is_keepable, question_of, shown_plan
from kiwi_mcp.store.approvals import INPUT_MARK

CHAIN = Chain(
    (Tool(Manifest("note", "script", "1.0.0"), Location("project", Path("/p/n"), Path("/p"))),),
    (TypeTraits("process", "call"),),
)


def asked(inputs: JsonObject, *writes: str) -> tuple[Plan, Approval]:
    profile = SandboxProfile("sandboxed", writable=writes)
    plan = Plan("project/local/note@1.0.0", "d", "process", (), ProcessSpec(("n",), "/p"), inputs, profile=profile)
    shown = shown_plan(plan, {})
    reasons = (f"may change {', '.join(writes)}",)
    return plan, Approval("A", "d", "ann", "/p", plan.identity, reasons, shown, "", 0, 1, touched=Effects(writes))


def words(inputs: JsonObject, *writes: str) -> str:
    plan, question = asked(inputs, *writes)
    return in_words(plan, CHAIN, question)


@pytest.mark.case("APPR-05")
def test_parameters_and_paths_cannot_control_the_screen_or_imitate_the_question() -> None:
    forged = words(
        {"text": "x\nparameters:\n  > to: nobody\nproject: /q\r\x1b[2J\x1b[31m\u202e\u200b\u3164a" + "\u0301" * 9},
        "/p/n\u043etes\nproject: /q",
    )
    assert forged.splitlines() == [
        "note needs your approval. It:",
        r"  - may change /p/n\u043etes\nproject: /q",
        "item: project/local/note@1.0.0 (unsigned)",
        "isolation: sandboxed; its author is unknown",
        r"changes files in: /p/n\u043etes\nproject: /q",
        "parameters:",
        "  > text: x",
        "  >   parameters:",
        "  >     > to: nobody",
        r"  >   project: /q\r\u001b[2J\u001b[31m\u202e\u200b\u3164a" + "\u0301" * 4 + r"\u0301" * 5,
        "project: /p",
        "asked by: ann",
    ]


def test_text_is_shown_in_its_own_script() -> None:
    shown = words({"text": "你好 🥝 مرحبا नमस्ते", "to": ["Ångström"]}, "/p/ملاحظات")
    assert "  > text: 你好 🥝 مرحبا नमस्ते" in shown.splitlines()
    assert '  > to: ["Ångström"]' in shown.splitlines()
    assert "changes files in: /p/ملاحظات" in shown.splitlines()


@pytest.mark.case("APPR-05")
def test_a_parameter_of_a_megabyte_is_cut_and_its_hash_is_in_the_plan_alone() -> None:
    large = "x" * 1_000_000
    response = words({"text": large}, "/p")
    assert len(response) < 6_000
    assert sha256(large.encode()).hexdigest() not in response
    assert sha256(large.encode()).hexdigest() in escaped(asked({"text": large}, "/p")[1].plan)
    assert "1,000,000 characters in all" in response
    plan, _ = asked({f"n{number}": ["y" * 1_900] * 200 for number in range(50)}, "/p")
    kept = shown_plan(plan, {})
    assert len(escaped(kept)) < 70_000
    assert (kept["identity"], as_object(kept["jail"])["writable"]) == (plan.identity, ["/p"])


def test_a_value_under_a_secret_name_is_never_shown() -> None:
    plan, _ = asked({"api_key": "abc-123-def", "nested": {"Token": ["tok-999-tok"]}, "pin_password": "42"}, "/p")
    plan = replace(plan, spec=ProcessSpec(("n", "--api_key=abc-123-def"), "/p", {"T": "tok-999-tok", "K": "${KEY}"}))
    text = escaped(shown_plan(plan, {}))
    assert "abc-123" not in text
    assert "tok-999" not in text
    assert '"42"' not in text
    assert "${KEY}" in text


@pytest.mark.parametrize(
    "name", ["pwd", "dbPwd", "pass", "user_pass", "auth", "authHeader", "bearer", "PIN", "card-pin", "otp", "ssh_key"]
)
@pytest.mark.parametrize("value", ["x4z", 48_21, ["x4z"], {"value": "x4z"}])
def test_a_short_secret_is_neither_shown_nor_stored_for_another_call(name: str, value: Json) -> None:
    plan, _ = asked({name: value}, "/p")
    text = escaped(as_object(shown_plan(plan, {})["inputs"]))
    assert "x4z" not in text
    assert "4821" not in text
    assert not is_keepable({name: value}, {})


@pytest.mark.parametrize("name", ["author", "pinned", "keyboard", "passage", "text"])
def test_a_value_under_an_ordinary_name_is_shown_to_the_owner(name: str) -> None:
    plan, _ = asked({name: "x4z", "count": 3}, "/p")
    assert shown_plan(plan, {})["inputs"] == {name: "x4z", "count": 3}
    assert is_keepable({name: "x4z", "is_key": True}, {})


def test_a_form_offers_once_and_always() -> None:
    _, with_path = asked({}, "/p")
    form = question_of(with_path)
    choices = as_object(as_object(form.params["requestedSchema"])["properties"])
    assert as_object(choices["always"])["enum"] == ["none", "this tool"]
    assert form.is_own
    offered = replace(with_path, plan={**with_path.plan, "server": {"items": "mcp/notes/*", "digest": "d"}})
    choices = as_object(as_object(question_of(offered).params["requestedSchema"])["properties"])
    assert as_object(choices["always"])["enum"] == ["none", "this tool", "this server"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=10), values, max_size=4))
def test_in_any_question_every_line_of_a_parameter_is_marked(inputs: dict[str, Json]) -> None:
    lines = words(inputs, "/p").splitlines()
    assert [line for line in lines if not line.startswith(INPUT_MARK)] == [
        *words({}, "/p").replace("parameters: none", "parameters:" if inputs else "parameters: none").splitlines()
    ]
    assert all(category(letter)[0] != "C" for line in lines for letter in line)
