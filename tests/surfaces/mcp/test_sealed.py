"""Encrypted call states: opened only by the same call."""

from __future__ import annotations

import base64

from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.surfaces.mcp.calls import StateCodec, bind

CALL = bind("ann", "tools/call", "say", {"text": "hi"})


def test_a_state_returns_its_ticket_to_the_same_call() -> None:
    seal = StateCodec()
    assert seal.open(seal.close("ticket", CALL, seconds=9), CALL) == "ticket"


def test_the_order_of_arguments_does_not_matter() -> None:
    assert bind("ann", "m", "n", {"a": 1, "b": 2}) == bind("ann", "m", "n", {"b": 2, "a": 1})


def test_another_principal_method_name_or_argument_opens_no_state() -> None:
    seal = StateCodec()
    state = seal.close("ticket", CALL, seconds=9)
    for other in (
        bind("bob", "tools/call", "say", {"text": "hi"}),
        bind("ann", "prompts/get", "say", {"text": "hi"}),
        bind("ann", "tools/call", "sing", {"text": "hi"}),
        bind("ann", "tools/call", "say", {"text": "ho"}),
    ):
        assert seal.open(state, other) is None


def test_a_state_expires() -> None:
    seal = StateCodec()
    assert seal.open(seal.close("ticket", CALL, seconds=0), CALL) is None


def test_another_process_opens_no_state() -> None:
    assert StateCodec().open(StateCodec().close("ticket", CALL, seconds=9), CALL) is None


def test_a_state_reveals_nothing() -> None:
    state = StateCodec().close("ticket", CALL, seconds=9)
    raw = base64.urlsafe_b64decode(state.partition(".")[2] + "==")
    assert b"ticket" not in raw
    assert CALL.encode() not in raw


@settings(max_examples=40, deadline=None)
@given(where=st.integers(min_value=0), letter=st.characters())
def test_a_changed_state_is_refused(where: int, letter: str) -> None:
    seal = StateCodec()
    state = seal.close("ticket", CALL, seconds=9)
    place = where % len(state)
    changed = state[:place] + letter + state[place + 1 :]
    assert seal.open(changed, CALL) == ("ticket" if changed == state else None)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=9_000))
def test_any_other_state_is_refused(text: str) -> None:
    assert StateCodec().open(text, CALL) is None
