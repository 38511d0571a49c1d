"""Approvals in the store: asked once, answered by the owner, used once, and durable."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.errors import ApprovalNotFound, ApprovalsWaiting, Conflict, Denied
from kiwi_mcp.domain.records import LIFETIME_MS, Approval, ApprovalRule, Effects
from kiwi_mcp.domain.times import run_id
from kiwi_mcp.store.approvals import MOST_A_MINUTE, MOST_PENDING, Approvals
from kiwi_mcp.store.database import Database

NOW = 1_769_601_600_000
RUN = run_id(NOW, 7)


@pytest.fixture
def approvals(database: Database) -> Approvals:
    return Approvals(database, "ann")


def a_question(number: int = 1, *, at: int = NOW, actor: str = "ann", digest: str = "") -> Approval:
    return Approval(
        id=run_id(at, number),
        plan_digest=digest or f"{number:064x}",
        actor=actor,
        project="/p \ud83d \0",
        identity="project/local/note@1.0.0",
        reasons=("may change /p",),
        plan={"identity": "note", "inputs": {"text": "ü \ud83d \0"}},
        preview='note waits\nparameters: {"text": "ü"}\nproject: /p',
        created_at=at,
        expires_at=at + LIFETIME_MS,
        touched=Effects(("/p",), ()),
        first_runs=("f" * 64,),
        request={"item_id": "note"},
    )


def yes(approvals: Approvals, question: Approval, at: int = NOW) -> Approval:
    return approvals.decide(question.id, "approved", by="ann", how="cli", now=at)


def test_a_question_is_stored_unchanged_and_once(approvals: Approvals) -> None:
    asked = approvals.ask(a_question())
    found = approvals.get(asked.id[:14], NOW)
    assert (found.plan, found.touched, found.first_runs) == (asked.plan, asked.touched, asked.first_runs)
    assert (found.request, found.reasons, found.status) == (asked.request, asked.reasons, "pending")
    again = approvals.ask(replace(a_question(2), plan_digest=asked.plan_digest))
    assert again.id == asked.id
    assert len(approvals.list(NOW)) == 1


@pytest.mark.case("APPR-02")
@pytest.mark.case("APPR-03")
def test_an_approval_covers_its_plan_actor_project_and_owner(approvals: Approvals, database: Database) -> None:
    asked = approvals.ask(a_question())
    yes(approvals, asked)
    for other in (
        replace(asked, plan_digest="0" * 64),
        replace(asked, actor="token:agent:1"),
        replace(asked, project="/elsewhere"),
        replace(asked, created_at=asked.expires_at),
    ):
        assert approvals.take(other, RUN) is None
    strangers = Approvals(database, "bob")
    assert strangers.take(asked, RUN) is None
    assert not strangers.list(NOW)
    assert not approvals.list(NOW, actor="token:agent:1")
    assert approvals.list(NOW, status="approved", actor="ann")
    with pytest.raises(ApprovalNotFound):
        strangers.decide(asked.id, "approved", by="bob", how="cli", now=NOW)
    assert approvals.take(asked, RUN) is not None


def test_an_approval_is_used_by_one_of_many_concurrent_calls(approvals: Approvals) -> None:
    asked = approvals.ask(a_question())
    yes(approvals, asked)
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda number: approvals.take(asked, run_id(NOW, number)), range(8)))
    (used,) = filter(None, taken)
    assert approvals.get(asked.id, NOW) == used
    assert used.status == "used"
    assert approvals.unknown(["f" * 64, "e" * 64]) == ("e" * 64,)
    assert approvals.unfinished(asked) == used.run_id


def test_an_answer_to_a_waiting_caller_is_used_at_once_by_that_caller(approvals: Approvals) -> None:
    asked = approvals.ask(a_question())
    first = approvals.accept(asked, RUN, by="ann", how="mcp", now=NOW)
    second = approvals.accept(asked, run_id(NOW, 9), by="ann", how="mcp", now=NOW)
    assert (first.id, first.status, first.decided_how) == (asked.id, "used", "mcp")
    assert second.id != first.id
    assert [one.status for one in approvals.list(NOW)] == ["used", "used"]
    assert approvals.unknown(["f" * 64]) == ()
    assert approvals.take(asked, RUN) is None


def test_a_denial_given_elsewhere_wins_over_a_later_approval(approvals: Approvals) -> None:
    asked = approvals.ask(a_question())
    approvals.decide(asked.id, "denied", by="ann", how="cli", now=NOW)
    with pytest.raises(Denied):
        approvals.accept(asked, RUN, by="ann", how="mcp", now=NOW + 1)
    late = approvals.ask(a_question(2))
    with pytest.raises(Denied):
        approvals.accept(late, RUN, by="ann", how="mcp", now=late.expires_at)
    assert [one.run_id for one in approvals.list(NOW)] == ["", ""]


def test_a_denial_can_be_reversed_until_it_expires(approvals: Approvals) -> None:
    first, second = approvals.ask(a_question()), approvals.ask(a_question(2))
    for asked in (first, second):
        approvals.decide(asked.id, "denied", by="ann", how="mcp", now=NOW, reason="not now")
    taken_back = yes(approvals, first, NOW + 1)
    assert (taken_back.status, taken_back.reason) == ("approved", "")
    assert approvals.denied(first, NOW - 1) is None
    assert approvals.take(first, RUN) is not None
    with pytest.raises(Conflict):
        approvals.decide(first.id, "denied", by="ann", how="cli", now=NOW + 2)
    with pytest.raises(Conflict, match="expired"):
        yes(approvals, second, second.expires_at)


def test_a_used_approval_is_newer_than_the_denial_before_it(approvals: Approvals) -> None:
    asked = approvals.ask(a_question())
    approvals.decide(asked.id, "denied", by="ann", how="mcp", now=NOW)
    again = approvals.ask(replace(a_question(2), plan_digest=asked.plan_digest))
    assert approvals.denied(asked, NOW - 1) is not None
    approvals.accept(again, RUN, by="ann", how="cli", now=NOW + 1)
    assert approvals.denied(asked, NOW - 1) is None


@pytest.mark.parametrize("end", ["used", "accepted", "denied", "expired"])
def test_an_answered_question_has_no_parameters_and_is_removed_after_a_month(end: str, approvals: Approvals) -> None:
    asked, now = approvals.ask(a_question()), NOW
    match end:
        case "used":
            yes(approvals, asked)
            assert approvals.get(asked.id, NOW).request == asked.request
            approvals.take(asked, RUN)
        case "accepted":
            approvals.accept(asked, RUN, by="ann", how="mcp", now=NOW)
            approvals.accept(asked, run_id(NOW, 9), by="ann", how="mcp", now=NOW)
        case "denied":
            approvals.decide(asked.id, "denied", by="ann", how="cli", now=NOW)
        case _:
            now = asked.expires_at
    approvals.ask(a_question(3, at=now))
    for over in [one for one in approvals.list(now) if one.status != "pending"]:
        assert (over.plan, over.request) == ({"identity": "note"}, None)
        assert over.preview.splitlines()[1:] == ["parameters: (not kept once a question is over)", "project: /p"]
    month = 30 * 86_400_000
    approvals.ask(a_question(4, at=NOW + month + 1))
    assert asked.id not in {one.id for one in approvals.list(NOW + month + 1)}


def test_a_number_is_never_used_again(approvals: Approvals) -> None:
    first, second = approvals.ask(a_question()), approvals.ask(a_question(2))
    assert (first.number, second.number) == (1, 2)
    assert approvals.get("2", NOW).id == second.id
    approvals.decide("2", "denied", by="ann", how="cli", now=NOW)
    later = NOW + 31 * 86_400_000
    assert approvals.ask(a_question(3, at=later)).number == 3  # the others are pruned now
    with pytest.raises(ApprovalNotFound):
        approvals.get("2", later)
    assert approvals.ask(a_question(4, at=later)).number == 4


def test_an_ambiguous_id_prefix_answers_no_question(approvals: Approvals) -> None:
    first, second = approvals.ask(a_question()), approvals.ask(a_question(2))
    with pytest.raises(ApprovalNotFound):
        approvals.decide(first.id[:10], "approved", by="ann", how="cli", now=NOW)
    assert {approvals.get(one.id, NOW).status for one in (first, second)} == {"pending"}


def test_repeated_answers_give_the_same_result(approvals: Approvals) -> None:
    asked = approvals.ask(a_question())
    assert yes(approvals, asked) == yes(approvals, asked, NOW + 5)
    denied = approvals.decide(asked.id, "denied", by="ann", how="cli", now=NOW + 9, reason="not now")
    assert (denied.status, denied.reason) == ("denied", "not now")
    assert approvals.take(asked, RUN) is None
    assert approvals.denied(asked, NOW) is not None
    assert approvals.denied(asked, NOW + 9) is None


def test_an_unanswered_question_expires(approvals: Approvals) -> None:
    asked = approvals.ask(a_question())
    late = asked.expires_at
    assert [one.status for one in approvals.list(late)] == ["expired"]
    assert not approvals.list(late, status="pending")
    assert approvals.list(late, status="expired")
    with pytest.raises(Conflict):
        yes(approvals, asked, late)
    assert approvals.ask(a_question(2, at=late, digest=asked.plan_digest)).id != asked.id


@pytest.mark.case("APPR-08")
def test_a_flood_of_questions_is_refused_and_existing_ones_stay(approvals: Approvals) -> None:
    for number in range(MOST_A_MINUTE):
        approvals.ask(a_question(number))
    with pytest.raises(ApprovalsWaiting) as refused:
        approvals.ask(a_question(999))
    assert refused.value.details["waiting"] == MOST_A_MINUTE
    assert approvals.ask(a_question(999, actor="token:other:1")).status == "pending"
    minute = 60_000
    for number in range(MOST_A_MINUTE, MOST_PENDING):
        approvals.ask(a_question(number, at=NOW + minute))
    with pytest.raises(ApprovalsWaiting):
        approvals.ask(a_question(998, at=NOW + 3 * minute))
    assert len(approvals.list(NOW, limit=1_000)) == MOST_PENDING + 1


def test_rules_are_stored_once_listed_and_removed(approvals: Approvals, database: Database) -> None:
    rule = ApprovalRule(
        RUN, "project/local/*", NOW, "ann", paths=("/p/ü",), argv=("git", "status"), project="/p", digest="d"
    )
    assert approvals.add_rule(rule) == rule
    assert approvals.add_rule(replace(rule, id=run_id(NOW, 8), created_at=NOW + 1)) == rule
    assert approvals.rules() == (rule,)
    assert not Approvals(database, "bob").rules()
    with pytest.raises(ApprovalNotFound):
        Approvals(database, "bob").remove_rule(rule.id)
    assert approvals.remove_rule(rule.id[:12]) == rule
    assert not approvals.rules()
