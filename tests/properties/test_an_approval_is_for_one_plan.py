"""An approval never applies to another plan, another actor, another project, nor a second time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.domain.records import LIFETIME_MS, Approval
from kiwi_mcp.domain.times import run_id
from kiwi_mcp.kernel.prepared import plan_digest
from kiwi_mcp.store.approvals import Approvals
from kiwi_mcp.store.open import open_database

NOW = 1_769_601_600_000
_numbers = count(1)


@pytest.fixture(scope="module")
def approvals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Approvals]:
    """One store for all examples: each has a project of its own in it."""
    folder: Path = tmp_path_factory.mktemp("store")
    database = open_database(f"sqlite://{folder}/a.db")
    yield Approvals(database, "ann")
    database.close()


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
plans = st.builds(
    lambda identity, argv, text, level, writable: Plan(
        f"project/local/{identity}@1.0.0",
        "d",
        "process",
        (),
        ProcessSpec(("n", *argv), "/p"),
        {"text": text},
        profile=SandboxProfile(level, writable=tuple(writable)),
    ),
    st.sampled_from(["a", "b"]),
    st.lists(texts, max_size=2),
    texts,
    st.sampled_from(["sandboxed", "restricted"]),
    st.lists(st.sampled_from(["/p", "/q"]), max_size=2, unique=True),
)


def a_question(plan: Plan, actor: str, project: str) -> Approval:
    number = next(_numbers)
    identity = plan.identity
    return Approval(
        run_id(NOW, number), plan_digest(plan), actor, project, identity, (), {}, "", NOW, NOW + LIFETIME_MS
    )


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(plans, plans, st.sampled_from(["ann", "token:x:1"]), st.sampled_from(["ann", "token:x:1"]))
def test_an_approval_covers_exactly_its_plan_and_once(
    approvals: Approvals, shown: Plan, other: Plan, asker: str, runner: str
) -> None:
    project = f"/p{next(_numbers)}"
    asked = approvals.ask(a_question(shown, asker, project))
    approvals.decide(asked.id, "approved", by="ann", how="cli", now=NOW)
    tried = a_question(other, runner, project)
    is_same = shown.to_json() == other.to_json() and asker == runner
    assert approvals.take(replace(tried, project=f"{project}x"), "0" * 26) is None
    assert (approvals.take(tried, "0" * 26) is not None) == is_same
    assert (approvals.take(asked, "0" * 26) is not None) == (not is_same)
    assert approvals.take(asked, "0" * 26) is None
