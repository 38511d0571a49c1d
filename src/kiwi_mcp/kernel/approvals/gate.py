"""The gate: a plan that changes the owner's files or sends data out goes on by the owner's word alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape
from typing import TypeAlias

from kiwi_mcp.domain.approval import LIFETIME_MS, Approval, ApprovalRule, Touched
from kiwi_mcp.domain.call import Call
from kiwi_mcp.domain.caller import Caller, nobody
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import ApprovalRequired, Conflict, Denied, Unanswered
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.plan import Plan, ReadSpec
from kiwi_mcp.domain.run import iso
from kiwi_mcp.kernel.approvals.code import code_of
from kiwi_mcp.kernel.approvals.question import ALWAYS, in_words, is_keepable, question_of, shown_plan
from kiwi_mcp.kernel.confining import Judge
from kiwi_mcp.kernel.provenance import chain_digest
from kiwi_mcp.kernel.watching import known_as
from kiwi_mcp.policy.asking import covering, installed, is_carrying, is_of_project, reasons, touched
from kiwi_mcp.store.approvals import Approvals
from kiwi_mcp.store.runs import new_run

_REPEATED_MS = 600_000
"""For how long a no holds for the same plan, without asking again."""
_UNTOUCHED = Touched()
_PATIENCE = 900.0
"""How long the owner may take for an answer, in seconds."""


@dataclass(frozen=True, slots=True)
class Need:
    """Why a plan waits for the owner; nothing where it does not."""

    touches: Touched = _UNTOUCHED
    first_runs: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    is_tainted: bool = False
    """Whether others may have talked whoever calls into it."""

    def to_json(self, rule: ApprovalRule | None = None) -> JsonObject:
        """Return it as plans and `why` show it."""
        told: JsonObject = {"needed": bool(self.reasons) and rule is None, "reasons": list(self.reasons)}
        return {**told, "rule_id": rule.id} if rule else told


NO_NEED = Need()


@dataclass(frozen=True, slots=True)
class Passed:
    """By what a plan went on that had to be asked about: a rule, or an approval that is used up now."""

    rule_id: str = ""
    approval_id: str = ""

    def to_json(self) -> JsonObject:
        """Return it as answers and receipts show it."""
        return {"rule_id": self.rule_id} if self.rule_id else {"approval_id": self.approval_id}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A plan at the gate, and whoever waits for it."""

    chain: Chain
    plan: Plan
    digest: str
    run_id: str
    secrets: Mapping[str, str]
    caller: Caller
    again: Callable[[], str]
    """Takes the call through every other gate once more, and gives the digest of its plan then."""


Admit: TypeAlias = Callable[[Arrival], Awaitable[Passed | None]]
"""Lets a plan go on, or refuses it; None where nobody had to be asked."""


async def unasked(_: Arrival) -> None:
    """Let every plan go on."""


class Gate:
    """The gate for one call of an actor, the owner where none is named; `how` is the way that it came.

    `has_read_others` says whether the actor was given words from outside before, which may have asked for the call;
    `is_by_hand` whether it is the owner's own hand that calls.
    """

    def __init__(
        self,
        approvals: Callable[[], Approvals],
        judge: Judge,
        call: Call,
        *,
        actor: str,
        how: str,
        has_read_others: bool = False,
        is_by_hand: bool = False,
    ) -> None:
        self._approvals = approvals
        self._has_read_others = has_read_others
        self._is_by_hand = is_by_hand
        self._judge = judge
        self._call = call
        self._actor = actor
        self._how = how

    def _written(self, plan: Plan, chain: Chain) -> Sequence[str]:
        """Return the digests of what a model wrote; where that could not be looked up, of all that it may have."""
        if isinstance(plan.spec, ReadSpec):
            return ()
        holding = self._judge(chain)
        if not holding.is_looked_up:
            return [known_as(link, chain) for link in chain.links if _is_doubtful(link, chain)]
        floors = holding.floors
        return [
            known_as(link, chain)
            for link, floor in zip(chain.links, floors, strict=True)
            if floor.provenance == "model_written"
        ]

    def _unknown(self, written: Sequence[str]) -> tuple[str, ...]:
        """Return what was never run of what a model wrote; a store that cannot be read is an error, and no yes."""
        return self._approvals().unknown(written) if written else ()

    def _need(self, plan: Plan, chain: Chain, first: tuple[str, ...]) -> Need:
        if isinstance(plan.spec, ReadSpec):
            return NO_NEED
        touches = touched(plan, chain)
        is_tainted = self._has_read_others and is_carrying(touches)
        told = reasons(touches, first, is_tainted=is_tainted, packages=installed(plan))
        return Need(touches, first, told, is_tainted) if told else NO_NEED

    def preview(self, plan: Plan, chain: Chain) -> JsonObject:
        """Return whether a plan would wait for the owner, and why."""
        need = self._need(plan, chain, self._unknown(self._written(plan, chain)))
        return need.to_json(self._rule(plan, chain, need) if need.reasons else None)

    async def admit(self, arrival: Arrival) -> Passed | None:
        """Let a plan go on by a rule, by an approval, or by the owner's answer; else keep the question, and refuse."""
        written = self._written(arrival.plan, arrival.chain)
        first = await asyncio.to_thread(self._unknown, written) if written else ()
        need = self._need(arrival.plan, arrival.chain, first)
        if not need.reasons:
            return None
        found = await asyncio.to_thread(self._look, arrival, need)
        if isinstance(found, Passed):
            return found
        if not is_askable(arrival.caller):
            raise _required(arrival, found)
        always = await self._ask(arrival, found)
        # The owner took their time: every other gate is passed again, and only the plan that was shown goes on.
        if arrival.again() != arrival.digest:
            raise Conflict(
                f"{arrival.chain.tool.id!r} changed while the owner was asked about it. Nothing was done.",
                suggestion="Call it again: the owner is asked about what it is now.",
            )
        return await asyncio.to_thread(self._accept, found, arrival.run_id, always)

    def _rule(self, plan: Plan, chain: Chain, need: Need) -> ApprovalRule | None:
        # What a model wrote is looked at once by the owner, whatever the rules say, and so is what may carry off files
        # after words of others were read.
        if need.first_runs or need.is_tainted:
            return None
        approvals = self._approvals()
        rules = approvals.rules()
        return covering(
            rules,
            plan,
            need.touches,
            actor=self._actor or approvals.owner,
            project=str(self._call.space.project),
            content=chain_digest(chain) if any(rule.digest for rule in rules) else "",
            now=_now(),
        )

    def _look(self, arrival: Arrival, need: Need) -> Passed | Approval:
        """Return by what a plan goes on, or the question that waits.

        A no that was said lately still holds, but not for the owner, who may think better of it.
        """
        if rule := self._rule(arrival.plan, arrival.chain, need):
            return Passed(rule_id=rule.id)
        asked = self._question(arrival, need)
        if used := self._take(asked, arrival.run_id):
            return used
        approvals = self._approvals()
        is_by_hand = self._is_by_hand and is_askable(arrival.caller)
        if not is_by_hand and (refused := approvals.denied(asked, asked.created_at - _REPEATED_MS)):
            raise _denied(arrival.chain.tool.id, refused)
        doubt = ""
        if begun := approvals.unfinished(asked):
            doubt = f"you said yes to exactly this before; the run {begun} began, and whether it was done is unknown"
        if code := code_of(arrival.chain, asked.first_runs, arrival.secrets):
            asked = replace(asked, plan={**asked.plan, "code": code})
        way = f"{self._how}, client {arrival.caller.client}" if arrival.caller.client else self._how
        return approvals.ask(replace(asked, preview=in_words(arrival.plan, arrival.chain, asked, doubt, way)))

    def _take(self, asked: Approval, run_id: str) -> Passed | None:
        used = self._approvals().take(replace(asked, created_at=_now()), run_id)
        return Passed(approval_id=used.id) if used else None

    def _question(self, arrival: Arrival, need: Need) -> Approval:
        now, call = _now(), self._call
        return Approval(
            id=new_run(now)[0],
            plan_digest=arrival.digest,
            actor=self._actor or self._approvals().owner,
            project=str(call.space.project),
            identity=arrival.plan.identity,
            reasons=need.reasons,
            plan=shown_plan(arrival.plan, arrival.secrets),
            preview="",
            created_at=now,
            expires_at=now + LIFETIME_MS,
            touched=need.touches,
            first_runs=need.first_runs,
            content=chain_digest(arrival.chain),
            request={"item_id": call.tool_id, "parameters": call.parameters, "frozen": call.is_frozen}
            if is_keepable(call.parameters, arrival.secrets)
            else None,
        )

    async def _ask(self, arrival: Arrival, asked: Approval) -> str:
        """Ask the owner, and return for what the yes is from now on; a no is kept, and without a word it waits on."""
        try:
            async with asyncio.timeout(_PATIENCE):
                answers = await arrival.caller.ask({"approve": question_of(asked)})
        except (Unanswered, TimeoutError) as silence:
            raise _required(arrival, asked) from silence
        answer = as_object(answers.get("approve"))
        said = as_object(answer.get("content"))
        is_accepted = answer.get("action") == "accept"
        if is_accepted and said.get("approve") is True:
            return as_text(said.get("always"))
        if answer.get("action") == "decline" or (is_accepted and said.get("approve") is False):
            await self._deny(asked)
            raise _denied(arrival.chain.tool.id, asked)
        raise _required(arrival, asked)  # the form was closed, or left as it was

    async def _deny(self, asked: Approval) -> None:
        def deny() -> None:
            approvals = self._approvals()
            with suppress(Conflict):  # whoever asked the same beside this call was answered already
                approvals.decide(asked.id, "denied", by=approvals.owner, how=self._how, now=_now())

        await asyncio.to_thread(deny)

    def _accept(self, asked: Approval, run_id: str, always: str) -> Passed:
        """Keep the owner's yes, used up for this run, and a rule where it need not be asked again."""
        approvals = self._approvals()
        used = approvals.accept(asked, run_id, by=approvals.owner, how=self._how, now=_now())
        if always in ALWAYS[1:]:
            approvals.add_rule(rule_from(asked, approvals.owner))
        return Passed(approval_id=used.id)


def rule_from(asked: Approval, owner: str) -> ApprovalRule:
    """Return the rule by which a question is not asked again: for its tool as it is, and for no more than it touches.

    An edit of the tool asks again, and so does the tool of the same name in another project.
    """
    now = _now()
    return ApprovalRule(
        id=new_run(now)[0],
        item=escape(asked.identity),
        created_at=now,
        created_by=owner,
        actor=asked.actor,
        paths=tuple(map(escape, asked.touched.writes)),
        hosts=asked.touched.sends,
        project=asked.project if is_of_project(asked.identity) else "",
        digest=asked.content,
    )


def _is_doubtful(link: Tool, chain: Chain) -> bool:
    """Whether a link may be a model's, for all that it shows itself: it is no server's, and not signed by the owner."""
    return link.origin.source not in {"builtin", "mcp"} and chain.driver != "mcp" and link.trust != "owner"


def is_askable(caller: Caller) -> bool:
    """Whether a caller can put a question to the owner."""
    if not caller.is_owner or caller.ask is nobody:
        return False
    # A client of MCP says what it can be asked, and an empty word means forms; whoever is no client says nothing.
    modes = as_object(caller.capabilities.get("elicitation"))
    return not caller.capabilities or ("elicitation" in caller.capabilities and (not modes or "form" in modes))


def _required(arrival: Arrival, asked: Approval) -> ApprovalRequired:
    return ApprovalRequired(
        arrival.chain.tool.id, approval_id=asked.id, reasons=asked.reasons, expires_at=iso(asked.expires_at)
    )


def _denied(tool_id: str, asked: Approval) -> Denied:
    because = f": {asked.reason}" if asked.reason else ""
    return Denied(
        f"The owner said no to {tool_id!r}{because}. Nothing was done.",
        suggestion="Do not call it again as it is; tell the owner what it was for, and go on without it. "
        f"The owner can take the no back: `kiwi approvals approve {asked.id}`.",
        tool_id=tool_id,
        approval_id=asked.id,
        reasons=list(asked.reasons),
    )


def _now() -> int:
    return time.time_ns() // 1_000_000
