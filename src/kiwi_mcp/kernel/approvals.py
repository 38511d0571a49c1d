"""`ApprovalGate`: need, rule, stored approval, question, one-time use."""

from __future__ import annotations

import asyncio
import glob
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Caller, CallOrigin, no_answers
from kiwi_mcp.domain.errors import ApprovalRequired, Conflict, Denied, InvalidRequest, Unanswered
from kiwi_mcp.domain.isolation import Provenance
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.plan import Plan, ReadSpec
from kiwi_mcp.domain.records import Approval, ApprovalRule, ApprovedBy, Effects
from kiwi_mcp.domain.times import iso, now_ms
from kiwi_mcp.kernel.approval_question import (
    ALWAYS,
    answers_of,
    code_of,
    in_words,
    is_keepable,
    question_of,
    shown_plan,
)
from kiwi_mcp.kernel.context import Context
from kiwi_mcp.kernel.provenance import chain_digest
from kiwi_mcp.kernel.recorder import Run
from kiwi_mcp.policy.approval_rules import (
    effects_of,
    installed,
    is_of_project,
    matching_rule,
    reasons,
    waits_first,
)
from kiwi_mcp.policy.isolation import known_as
from kiwi_mcp.primitives.secrets.redaction import without_secrets
from kiwi_mcp.store.approvals import Approvals
from kiwi_mcp.store.runs import new_run

_REPEATED_MS = 600_000
"""For how long a no holds for the same plan, without asking again."""
_UNTOUCHED = Effects()
_PATIENCE = 900.0
"""How long the owner may take for an answer, in seconds."""


class ApprovalNeed(Struct, frozen=True):
    """Why a plan waits for the owner; nothing where it does not."""

    touches: Effects = _UNTOUCHED
    first_runs: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    is_tainted: bool = False
    """Whether the caller may have been influenced by content from others."""

    def to_json(self, rule: ApprovalRule | None = None) -> JsonObject:
        """Return it as plans and `why` show it."""
        response: JsonObject = {"needed": bool(self.reasons) and rule is None, "reasons": list(self.reasons)}
        return {**response, "rule_id": rule.id} if rule else response


NO_NEED = ApprovalNeed()


class ApprovalGate(Struct, frozen=True):
    """Decides whether a plan needs an approval of the owner, and whether there is one."""

    context: Context

    def _approvals(self) -> Approvals:
        return self.context.services.store.approvals()

    def _unknown(self, waiting: Mapping[str, Provenance]) -> Mapping[str, Provenance]:
        """Return what of it was never run; a store that cannot be read is an error, and no yes."""
        unknown = self._approvals().unknown(waiting) if waiting else ()
        return {digest: waiting[digest] for digest in unknown}

    def _need(self, plan: Plan, touches: Effects, first: Mapping[str, Provenance]) -> ApprovalNeed:
        if isinstance(plan.spec, ReadSpec) or (touches == _UNTOUCHED and not first):
            return NO_NEED
        # Text from outside that the caller was given before may have asked for the call.
        has_read_others = self.context.caller.reader in self.context.services.tainted_callers
        is_tainted = has_read_others and bool(touches.writes and touches.sends)
        response = reasons(touches, first.values(), is_tainted=is_tainted, packages=installed(plan))
        return ApprovalNeed(touches, tuple(first), response, is_tainted) if response else NO_NEED

    def preview(self, run: Run) -> JsonObject:
        """Return whether a plan would wait for the owner, and why."""
        plan, chain = run.plan, run.chain
        touches = effects_of(plan, chain)
        need = self._need(plan, touches, self._unknown(waiting_first(run, touches)))
        return need.to_json(self._rule(plan, chain, need) if need.reasons else None)

    async def decide(self, run: Run) -> Approval | None:
        """Let a plan continue by a rule or an approval, noted in the run; else return the question, which is stored.

        A question that cannot be put to the owner now is a refusal.
        """
        touches = effects_of(run.plan, run.chain)
        waiting = waiting_first(run, touches)
        if not waiting and touches == _UNTOUCHED:
            return None
        first = await asyncio.to_thread(self._unknown, waiting) if waiting else {}
        need = self._need(run.plan, touches, first)
        if not need.reasons:
            return None
        found = await asyncio.to_thread(self._look, run, need)
        if isinstance(found, ApprovedBy):
            run.approved_by = found
            return None
        if not is_askable(self.context.caller):
            raise _required(run, found)
        return found

    def _rule(self, plan: Plan, chain: Chain, need: ApprovalNeed) -> ApprovalRule | None:
        # What others wrote is looked at once by the owner, whatever the rules say, and so is what may carry off files
        # after words of others were read.
        asks_always = plan.change is not None and plan.change.asks_always  # models follow what is changed
        if need.first_runs or need.is_tainted or asks_always:
            return None
        approvals = self._approvals()
        rules = approvals.rules()
        return matching_rule(
            rules,
            plan,
            need.touches,
            actor=self.context.caller.name or approvals.owner,
            project=str(self.context.catalog.space.project),
            contents=_contents(chain) if any(rule.digest for rule in rules) else frozenset(),
            scopes=scopes_of(self.context.caller.origin).values(),
            now=now_ms(),
        )

    def _look(self, run: Run, need: ApprovalNeed) -> ApprovedBy | Approval:
        """Return what approves a plan, or the question that waits for an answer.

        A recent refusal still applies, except to the owner when they can be asked, because they may decide differently.
        """
        if rule := self._rule(run.plan, run.chain, need):
            return ApprovedBy(rule_id=rule.id)
        asked = self._question(run, need)
        if used := self._take(asked, run):
            return used
        approvals = self._approvals()
        caller, surface = self.context.caller, self.context.services.surface
        is_by_hand = self.context.is_owner and is_askable(caller)
        if not is_by_hand and (refused := approvals.denied(asked, asked.created_at - _REPEATED_MS)):
            raise _denied(run.chain.tool.id, refused)
        doubt = ""
        if begun := approvals.unfinished(asked):
            doubt = f"you said yes to exactly this before; the run {begun} began, and whether it was done is unknown"
        if code := code_of(run.chain, asked.first_runs, _secrets(run)):
            asked = replace(asked, plan={**asked.plan, "code": code})
        way = f"{surface}, client {caller.client}" if caller.client else surface
        return approvals.ask(replace(asked, preview=in_words(run.plan, run.chain, asked, doubt, way)))

    def _take(self, asked: Approval, run: Run) -> ApprovedBy | None:
        approvals, now, repeated = self._approvals(), replace(asked, created_at=now_ms()), run.call.origin.repeats
        used = approvals.take(now, run.id)
        if used is None and repeated:
            used = approvals.take_again(now, run.id, repeated)
        return ApprovedBy(approval_id=used.id) if used else None

    def _question(self, run: Run, need: ApprovalNeed) -> Approval:
        now, call = now_ms(), run.call
        return Approval(
            id=new_run(now)[0],
            plan_digest=run.digest,
            actor=self.context.caller.name or self._approvals().owner,
            project=str(call.space.project),
            identity=run.plan.identity,
            reasons=need.reasons,
            plan={**shown_plan(run.plan, _secrets(run)), **_server(run.chain), **_thread(call.origin)},
            preview="",
            created_at=now,
            expires_at=now + self.context.caller.answer_ms,
            touched=need.touches,
            first_runs=need.first_runs,
            content=chain_digest(run.chain),
            request={
                "item_id": call.tool_id,
                "parameters": call.parameters,
                "frozen": call.is_frozen,
                **({"item_type": call.item_type} if call.item_type else {}),
            }
            # A thread makes its call again by itself.
            if not call.origin.thread and is_keepable(call.parameters, _secrets(run))
            else None,
        )

    async def ask(self, asked: Approval, run: Run) -> str:
        """Ask the owner, and return for what the yes is from now on; a no is kept, and without a word it waits on."""
        try:
            async with asyncio.timeout(_PATIENCE):
                caller = without_secrets(self.context.caller, _secrets(run))
                answers = await caller.ask({"approve": question_of(asked)})
        except (Unanswered, TimeoutError) as silence:
            raise _required(run, asked) from silence
        answer = as_object(answers.get("approve"))
        said = as_object(answer.get("content"))
        is_accepted = answer.get("action") == "accept"
        if is_accepted and said.get("approve") is True:
            return as_text(said.get("always"))
        if answer.get("action") == "decline" or (is_accepted and said.get("approve") is False):
            await self._deny(asked)
            raise _denied(run.chain.tool.id, asked)
        raise _required(run, asked)  # the form was closed, or left as it was

    async def _deny(self, asked: Approval) -> None:
        def deny() -> None:
            approvals = self._approvals()
            with suppress(Conflict):  # the same question from a parallel call was already answered
                approvals.decide(
                    asked.id, "denied", by=approvals.owner, how=self.context.services.surface, now=now_ms()
                )

        await asyncio.to_thread(deny)

    async def accept(self, asked: Approval, run: Run, always: str) -> ApprovedBy:
        """Store the owner's yes, used up for this run, and a rule where it need not be asked again."""
        return await asyncio.to_thread(self._accept, asked, run.id, always)

    def _accept(self, asked: Approval, run_id: str, always: str) -> ApprovedBy:
        approvals = self._approvals()
        rule = rule_from(asked, approvals.owner, always) if always in ALWAYS[1:] else None
        used = approvals.accept(asked, run_id, by=approvals.owner, how=self.context.services.surface, now=now_ms())
        if rule is not None:
            approvals.add_rule(rule)
        return ApprovedBy(approval_id=used.id)


def waiting_first(run: Run, touches: Effects) -> Mapping[str, Provenance]:
    """Return the digests of what waits for the owner before its first run, each with its origin.

    Where the origins could not be looked up, that is all that a model may have written.
    """
    if isinstance(run.plan.spec, ReadSpec):
        return {}
    chain, isolation = run.chain, run.prepared.isolation
    if not isolation.is_looked_up:
        return {known_as(link, chain): "unknown" for link in chain.links if _is_doubtful(link, chain)}
    waiting: dict[str, Provenance] = {}
    for link, floor in zip(chain.links, isolation.floors, strict=True):
        if waits_first(floor.provenance, touches):
            waiting[known_as(link, chain)] = floor.provenance
    return waiting


def rule_from(asked: Approval, owner: str, always: str) -> ApprovalRule:
    """Return the rule that answers a question from now on: for its tool as it is, and for no more than it touches.

    After an edit of the tool, the question is asked again. The same applies to a tool of that name in another project.
    For `this server` it is every tool of the server, as long as the server itself is as it is. For `this thread` and
    `this directive` it is for calls of that thread, or of threads of that directive as long as it is as it is.
    """
    now = now_ms()
    if always not in (fitting := answers_of(asked)):
        why = "is not a tool of an MCP server" if always == ALWAYS[2] else "was not called by a thread"
        raise InvalidRequest(
            f"{asked.identity} {why}.",
            suggestion=f"Answer once, or {', '.join(f'`{one}`' for one in fitting[1:])}.",
        )
    server, thread = as_object(asked.plan.get("server")), as_object(asked.plan.get("thread"))
    is_server = always == ALWAYS[2]
    return ApprovalRule(
        id=new_run(now)[0],
        item=as_text(server["items"]) if is_server else glob.escape(asked.identity),
        created_at=now,
        created_by=owner,
        actor=asked.actor,
        paths=tuple(map(glob.escape, asked.touched.writes)),
        hosts=asked.touched.sends,
        project=asked.project if is_of_project(asked.identity) else "",
        digest=as_text(server["digest"]) if is_server else asked.content,
        scope=as_text(as_object(thread.get("scopes")).get(always)),
    )


def scopes_of(origin: CallOrigin) -> dict[str, str]:
    """Return the scopes of rules that a call of a thread can have, by the answer that makes such a rule."""
    return {ALWAYS[3]: f"thread:{origin.thread}", ALWAYS[4]: f"directive:{origin.directive}"} if origin.thread else {}


def _thread(origin: CallOrigin) -> JsonObject:
    """Return the thread that makes a call, for the question about it and for an answer about more of its calls."""
    if not origin.thread:
        return {}
    return {"thread": {"thread_id": origin.thread, "path": origin.path, "scopes": {**scopes_of(origin)}}}


def _contents(chain: Chain) -> frozenset[str]:
    """Return the digests that a rule for a chain may have: its own, and that of its server."""
    return frozenset({chain_digest(chain), *([chain_digest(chain.server)] if chain.server else [])})


def _server(chain: Chain) -> JsonObject:
    """Return which tools the server of a chain has, and its digest, for an answer about all of them."""
    if chain.server is None or not (name := chain.tool.origin.server):
        return {}
    return {"server": {"items": f"{glob.escape(f'mcp/{name}')}/*", "digest": chain_digest(chain.server)}}


def _is_doubtful(link: Tool, chain: Chain) -> bool:
    """Whether a model may have written a link: no server offers it, and the owner did not sign it."""
    is_files = not link.origin.is_built_in and not link.origin.server
    return is_files and chain.server is None and link.trust != "owner"


def is_askable(caller: Caller) -> bool:
    """Whether a caller can put a question to the owner."""
    if not caller.is_owner or caller.ask is no_answers:
        return False
    # An MCP client declares what it can be asked, and an empty object means forms; other callers declare nothing.
    modes = as_object(caller.capabilities.get("elicitation"))
    return not caller.capabilities or ("elicitation" in caller.capabilities and (not modes or "form" in modes))


def _secrets(run: Run) -> Mapping[str, str]:
    return run.secrets or {}


def _required(run: Run, asked: Approval) -> ApprovalRequired:
    return ApprovalRequired(
        run.chain.tool.id,
        approval_id=asked.id,
        number=asked.number,
        reasons=asked.reasons,
        expires_at=iso(asked.expires_at),
    )


def _denied(tool_id: str, asked: Approval) -> Denied:
    because = f": {asked.reason}" if asked.reason else ""
    return Denied(
        f"The owner said no to {tool_id!r}{because}. Nothing was done.",
        suggestion="Do not call it again as it is; tell the owner what it was for, and go on without it. "
        f"The owner can take the no back: `kiwi approvals approve {asked.number}`.",
        tool_id=tool_id,
        approval_id=asked.id,
        reasons=list(asked.reasons),
    )
