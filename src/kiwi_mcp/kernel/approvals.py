"""`ApprovalGate`: need, rule, stored approval, question, one-time use.

The question is text that nothing in it can forge, with the code of a first run, and with secrets masked.
"""

from __future__ import annotations

import asyncio
import glob
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from unicodedata import category

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.domain.calls import Caller, CallOrigin, Question, no_answers
from kiwi_mcp.domain.errors import ApprovalRequired, Conflict, Denied, InvalidRequest, Unanswered
from kiwi_mcp.domain.isolation import Provenance
from kiwi_mcp.domain.items import Chain, Tool, ToolFile
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import HttpSpec, Plan, ReadSpec
from kiwi_mcp.domain.records import Approval, ApprovalRule, ApprovedBy, Effects
from kiwi_mcp.domain.times import iso, now_ms
from kiwi_mcp.kernel.context import Context
from kiwi_mcp.kernel.provenance import chain_digest
from kiwi_mcp.kernel.recorder import Run
from kiwi_mcp.policy.approval_rules import effects_of, installed, is_of_project, matching_rule, reasons, waits_first
from kiwi_mcp.policy.isolation import known_as
from kiwi_mcp.primitives.secrets.redaction import redact, without_secrets
from kiwi_mcp.store.approvals import INPUT_MARK, Approvals
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
        is_by_content = any(rule.digest for rule in rules)
        parts = (chain, chain.server)
        contents = [chain_digest(part) for part in parts if part is not None] if is_by_content else []
        return matching_rule(
            rules,
            plan,
            need.touches,
            actor=self.context.caller.name or approvals.owner,
            project=str(self.context.catalog.space.project),
            contents=frozenset(contents),
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
        repeatable: JsonObject | None = None
        # A thread makes its call again by itself.
        if not call.origin.thread and is_keepable(call.parameters, _secrets(run)):
            repeatable = {"item_id": call.tool_id, "parameters": call.parameters, "frozen": call.is_frozen}
            if call.item_type:
                repeatable["item_type"] = call.item_type
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
            request=repeatable,
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
            await asyncio.to_thread(self._deny, asked)
            raise _denied(run.chain.tool.id, asked)
        raise _required(run, asked)  # the form was closed, or left as it was

    def _deny(self, asked: Approval) -> None:
        approvals, how = self._approvals(), self.context.services.surface
        with suppress(Conflict):  # the same question from a parallel call was already answered
            approvals.decide(asked.id, "denied", by=approvals.owner, how=how, now=now_ms())

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
            f"{asked.identity} {why}.", suggestion=f"Answer once, or {', '.join(f'`{one}`' for one in fitting[1:])}."
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


_MOST_LETTERS = 6_000
"""How much of all files together is shown."""
_MOST_FILES = 20
_LONGEST_PATH = 200
_INDENT = "  | "
"""The prefix of each line of code, so that no code can be mistaken for a line of the question."""


def code_of(chain: Chain, first_runs: Collection[str], secrets: Mapping[str, str]) -> list[Json]:
    """Return the files of what never ran, each with its size and as much of its text as there is room for."""
    links = [link for link in chain.links if known_as(link, chain) in first_runs]
    files = [(link, file) for link in links for file in sorted(link.files, key=partial(_rank, link))]
    response: list[Json] = []
    room = _MOST_LETTERS
    for link, file in files[:_MOST_FILES]:
        text = redact(load_bytes(link, file).decode(errors="replace"), secrets) if room else ""
        is_whole = len(text) <= room and room > 0
        response.append(
            {"item": link.id, "path": file.path, "bytes": file.size, "text": text[:room], "whole": is_whole}
        )
        room -= min(len(text), room)
    if rest := [file for _, file in files[_MOST_FILES:]]:
        size = sum(file.size for file in rest)
        response.append({"item": chain.tool.id, "path": f"{len(rest)} more", "bytes": size, "text": "", "whole": False})
    return response


def _rank(link: Tool, file: ToolFile) -> tuple[bool, int, str]:
    """Return where a file stands: what is run first, and nothing large in the way of what is small."""
    return file.path != link.entrypoint, file.size, file.path


def code_in_words(files: Json) -> Iterator[str]:
    """Yield the lines that show some files; nothing in a file can begin a line, or act on a screen."""
    for file in map(as_object, as_list(files)):
        yield f"code: {visible(as_text(file.get('path'))[:_LONGEST_PATH])} ({text_of(file.get('bytes'))} bytes)"
        text = as_text(file.get("text"))
        yield from (f"{_INDENT}{visible(line)}" for line in text.removesuffix("\n").split("\n") if text)
        if not file.get("whole"):
            yield f"  (not all of it: `kiwi load {visible(as_text(file.get('item')))}` shows the rest)"


_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
_SPACES = " \u3000"
_MOST_MARKS = 4
"""How many marks one letter may have: more are drawn over the lines around it."""


def visible(text: str) -> str:
    """Return one line of text in its own script, with all escaped that does not look like what it is.

    That is what controls a screen, changes the direction of writing, is invisible, or looks like a space.
    """
    shown: list[str] = []
    marks = 0
    for letter in text:
        kind = category(letter)
        marks = marks + 1 if kind in {"Mn", "Me"} else 0
        is_space = kind[0] == "Z" and letter not in _SPACES
        is_unseen = kind[0] == "C" or is_space or letter in _BLANK or marks > _MOST_MARKS
        shown.append(json.dumps(letter)[1:-1] if is_unseen else letter)
    return "".join(shown)


def _parameter_lines(inputs: JsonObject) -> Iterator[str]:
    """Yield the lines that show parameters, each marked; further lines of one value are indented."""
    room = _LONGEST_PARAMETERS
    for name, value in inputs.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
        first, *more = _HASH.sub(")", text).split("\n")
        for line in (f"{visible(name)}: {visible(first)}", *(f"  {visible(line)}" for line in more)):
            if (room := room - len(line)) < 0:
                yield f"{INPUT_MARK}… (`--json` shows the rest)"
                return
            yield f"{INPUT_MARK}{line}"


ALWAYS = ("none", "this tool", "this server", "this thread", "this directive")
"""What a yes may be from now on: for the tool as it is, where it is, as long as it touches no more than now; or so for
every tool of its MCP server; or for the tool in calls of this thread, or of threads of this directive as it is."""
_HASH = lazy_pattern(r", sha256 [0-9a-f]{64}\)")
"""What a cut value ends with; a person has no use for it."""
_MIXED = lazy_pattern(r"[A-Za-z][\u0370-\u052f]|[\u0370-\u052f][A-Za-z]")
"""A Greek or Cyrillic letter beside a Latin one, which often looks the same."""
_MASK = "[hidden: it looks like a secret]"
_SECRET_NAME = lazy_pattern(
    r"(?i)passw|passphrase|secret|token|api[_-]?key|credential|authorization|private[_-]?key|cookie"
)
_SECRET_WORDS = frozenset({"pwd", "pass", "auth", "bearer", "pin", "otp", "key", "keys"})
"""Names of a secret, if they are a complete word: `pin` is one, `pinned` is not."""
_WORDS = lazy_pattern(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SHORTEST_SECRET = 6
"""A shorter value is hidden only in its own place, and not searched for elsewhere: it would be found everywhere."""
_LONGEST_TEXT = 1_000
_MOST_PARTS = 200
_LONGEST_PLAN = 60_000
_LONGEST_PARAMETERS = 4_000
_LONGEST_WORD = 400
_AUTHORS: Mapping[Provenance, str] = {
    "owner_written": "you wrote or signed it",
    "owner_pinned": "you pinned it",
    "owner_relaxed": "you relaxed it",
    "model_written": "a model wrote it",
    "known_publisher": "a publisher that you trust wrote it",
    "mcp_server": "an MCP server that you accepted",
    "unknown": "its author is unknown",
}


def escaped(value: Json) -> str:
    """Return a value as canonical JSON in ASCII: nothing in it acts on a screen, or looks like another letter."""
    return json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(", ", ": "))


def cut(text: str, limit: int) -> str:
    """Return the beginning of a text that is too long, with its length and the hash of all of it."""
    if len(text) <= limit:
        return text
    return (
        f"{text[:limit]}… ({len(text):,} characters in all, sha256 {sha256(text.encode(errors='replace')).hexdigest()})"
    )


def is_keepable(parameters: JsonObject, secrets: Mapping[str, str]) -> bool:
    """Whether parameters may be kept for another call: none of them looks like a secret, and they are not long."""
    text = escaped(parameters)
    return len(text) <= _LONGEST_PLAN and not _secret_values(parameters, shortest=1) and redact(text, secrets) == text


def shown_plan(plan: Plan, secrets: Mapping[str, str]) -> JsonObject:
    """Return a plan as it is kept and shown: bounded, and without what looks secret."""
    hidden = {**secrets, **{f"parameter-{place}": one for place, one in enumerate(_secret_values(plan.inputs))}}
    shown = as_object(_masked(plan.to_json(), hidden))
    if len(text := escaped(shown)) <= _LONGEST_PLAN:
        return shown
    kept = {word: shown[word] for word in ("identity", "digest", "driver", "jail", "effect") if word in shown}
    return {**kept, "left_out": cut(text, 0)}


def in_words(plan: Plan, chain: Chain, asked: Approval, doubt: str = "", way: str = "") -> str:
    """Return the question: what would run, from where, what it touches, its parameters, and the way it was asked."""
    tool = chain.tool
    vouched = ", ".join(dict.fromkeys(filter(None, (tool.integrity, tool.trust))))
    profile, inputs = plan.profile, as_object(asked.plan.get("inputs"))
    thread = as_object(asked.plan.get("thread"))
    lines = [
        f"{_word(tool.id)} needs your approval. It:",
        *(f"  - {_word(reason)}" for reason in asked.reasons),
        f"item: {_word(tool.identity)} ({_word(vouched)})",
        *([f"isolation: {profile.level}; {_AUTHORS.get(profile.provenance, 'built in')}"] if profile else []),
        *(f"changes files in: {_word(path)}" for path in asked.touched.writes),
        *(f"sends data to: {_word(host)}" for host in asked.touched.sends),
        *([f"request: {plan.spec.method} {_word(plan.spec.url)}"] if isinstance(plan.spec, HttpSpec) else []),
        *([f"uses the secrets: {', '.join(map(_word, plan.variables))}"] if plan.variables else []),
        "parameters:" if inputs else "parameters: none",
        *_parameter_lines(inputs),
        f"project: {_word(asked.project)}",
        f"asked by: {_word(asked.actor)}{f' ({_word(way)})' if way else ''}",
        *([f"thread: {_word(as_text(thread['path']))} ({thread['thread_id']})"] if thread else []),
        *([f"careful: {doubt}"] if doubt else []),
        *code_in_words(asked.plan.get("code")),
        *(_difference(plan.change.diff) if plan.change else ()),
    ]
    return "\n".join(lines)


def _difference(diff: str) -> Iterator[str]:
    """Yield the lines of a change; nothing in them can begin a line of the question."""
    if not diff:
        yield "difference: none"
        return
    yield "difference:"
    yield from (f"{_INDENT}{visible(line)}" for line in diff[:_MOST_LETTERS].split("\n"))
    if len(diff) > _MOST_LETTERS:
        yield f"  (not all of it: {len(diff):,} characters)"


def answers_of(asked: Approval) -> tuple[str, ...]:
    """Return what a yes to a question may be from now on: only what fits its call."""
    server = ALWAYS[2:3] if "server" in asked.plan else ()
    return (*ALWAYS[:2], *server, *(ALWAYS[3:] if "thread" in asked.plan else ()))


def question_of(asked: Approval) -> Question:
    """Return the question in the form that MCP uses; it cannot have been answered before it was asked."""
    answers: JsonObject = {"enum": list(answers_of(asked)), "default": ALWAYS[0]}
    fields: JsonObject = {
        "approve": {"type": "boolean", "title": "Run exactly this, once", "default": False},
        "always": {"type": "string", "title": "From now on without asking", **answers},
    }
    form: JsonObject = {"type": "object", "properties": fields, "required": ["approve"]}
    return Question("elicitation/create", {"message": asked.preview, "requestedSchema": form}, is_own=True)


def _word(text: str) -> str:
    """Return a name or a path on one line; one that mixes scripts is escaped, since it may look like another."""
    shown = escaped(text)[1:-1] if _MIXED.search(text) else visible(text)
    return shown if len(shown) <= _LONGEST_WORD else f"{shown[:_LONGEST_WORD]}… ({len(shown):,} characters in all)"


def _is_secret_name(name: str) -> bool:
    words = {word.lower() for word in _WORDS.findall(name)}
    return bool(_SECRET_NAME.search(name)) or not words.isdisjoint(_SECRET_WORDS)


def _secret_values(value: Json, *, is_named: bool = False, shortest: int = _SHORTEST_SECRET) -> Sequence[str]:
    """Return the texts and numbers under names of secrets, from some length on."""
    match value:
        case bool() | None:
            return []
        case str() | int() | float():
            return [str(value)] if is_named and len(str(value)) >= shortest else []
        case Mapping():
            return [
                text
                for name, inner in value.items()
                for text in _secret_values(inner, is_named=is_named or _is_secret_name(name), shortest=shortest)
            ]
        case list() | tuple():
            return [text for inner in value for text in _secret_values(inner, is_named=is_named, shortest=shortest)]
        case _:
            return []


def _masked(value: Json, hidden: Mapping[str, str], *, is_named: bool = False) -> Json:
    match value:
        case str():
            # A template names the secret, and does not hold it.
            is_masked = is_named and value != "" and not value.startswith("${")
            return _MASK if is_masked else cut(redact(value, hidden), _LONGEST_TEXT)
        case Mapping():
            parts = list(value.items())[:_MOST_PARTS]
            response = {
                as_text(_masked(word, hidden)): _masked(inner, hidden, is_named=is_named or _is_secret_name(word))
                for word, inner in parts
            }
            return response if len(value) <= _MOST_PARTS else {**response, "…": f"{len(value):,} in all"}
        case list() | tuple():
            more = [] if len(value) <= _MOST_PARTS else [f"… ({len(value):,} in all)"]
            return [*(_masked(inner, hidden, is_named=is_named) for inner in value[:_MOST_PARTS]), *more]
        case bool() | None:
            return value
        case _:
            return _MASK if is_named else value
