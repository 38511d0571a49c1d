"""A plan digest is the hash of the canonical form of the plan, by either implementation."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec, ReadSpec, Retry
from kiwi_mcp.kernel.prepared import plan_digest
from kiwi_mcp.manifest.signatures import canonical

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_texts = st.lists(_text, max_size=3).map(tuple)
_number = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_json = st.recursive(
    st.none() | st.booleans() | _number | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)
_object = st.dictionaries(_text, _json, max_size=4)
_process = st.builds(
    ProcessSpec,
    argv=_texts,
    cwd=_text,
    env=st.dictionaries(_text, _text, max_size=4),
    stdin=st.binary(max_size=8),
    timeout=st.integers(1, 10_000) | st.floats(0.001, 10_000),
)
_request = st.builds(
    HttpSpec,
    method=_text,
    url=_text,
    headers=st.dictionaries(_text, _text, max_size=3),
    body=st.none() | _json,
    timeout=st.integers(1, 10_000) | st.floats(0.001, 10_000),
    retry=st.builds(Retry, attempts=st.integers(1, 5)),
    stream=st.sampled_from(["", "sse"]),
    basic=st.none() | st.tuples(_text, _text),
    granted=_texts,
)
_plan = st.builds(
    Plan,
    identity=_text,
    tool_digest=_text,
    driver=_text,
    chain=st.lists(st.tuples(_text, _text), max_size=3).map(tuple),
    spec=_process | _request | st.builds(ReadSpec, _text, _text),
    inputs=_object,
    variables=_texts,
    facts=_object,
    effect=_text,
)


@given(_plan)
@settings(max_examples=60, deadline=None)
def test_a_plan_digest_is_the_hash_of_its_canonical_form(plan: Plan) -> None:
    assert plan_digest(plan) == sha256(canonical(plan.to_json())).hexdigest()


def test_a_whole_number_of_seconds_has_one_form() -> None:
    whole, with_fraction = (
        Plan("a", "b", "process", (), ProcessSpec((), "/", timeout=seconds), {}) for seconds in (300, 300.0)
    )
    assert plan_digest(whole) == plan_digest(with_fraction)


@pytest.mark.parametrize("value", [2**53, float("inf"), "\ud800"])
def test_a_plan_without_a_canonical_form_has_no_digest(value: float | str) -> None:
    with pytest.raises(InvalidRequest):
        plan_digest(Plan("a", "b", "process", (), ProcessSpec((), "/"), {"value": value}))
