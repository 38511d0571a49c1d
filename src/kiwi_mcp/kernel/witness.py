"""Witnesses: each sees one call through and gives its receipt, in which nothing secret stands."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping

from kiwi_mcp.domain.errors import ApprovalRequired, ApprovalsWaiting, Denied, InvalidRequest, PolicyDenied
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.receipt import AuditLevel, Receipt
from kiwi_mcp.domain.run import Run, RunStatus
from kiwi_mcp.kernel.requests import ACTIONS
from kiwi_mcp.kernel.runs import short
from kiwi_mcp.kernel.verbs import BY_NAME
from kiwi_mcp.manifest.digest import canonical, sha256_hex
from kiwi_mcp.primitives.secrets import redact
from kiwi_mcp.store.open import masked
from kiwi_mcp.store.plain import LONGEST
from kiwi_mcp.store.runs import new_run

_LOOKS = frozenset({"list", "show", "rules", "why", "validate", "versions", "diff", "verify", "export", "suggest"})
"""Actions that change nothing. What is not among them is written down, so that a new one cannot be forgotten."""
_SEARCHES = frozenset({"search", "load"})
"""Verbs that only look, and are written down all the same: what is looked for is part of what a model does."""
_GIVES_TRUST = frozenset({"sign", "key new", "key trust", "key rotate", "relax apply"})
"""Actions by which something is trusted from then on: whoever asks later why must find who did so, and when."""
_NAMES = (
    "item_id", "approval_id", "rule_id", "server", "name", "remote", "task_id", "run_id", "path", "client", "tool_id",
)  # fmt: skip
"""The words by which requests name what they are about, the most telling first."""
_LONGEST_NAME = 200
_SECRET_NAME = re.compile(
    rb"(?i)(?:passw|passphrase|secret|token|api[_-]?key|credential|authorization|private[_-]?key|cookie).{0,60}\Z",
    re.DOTALL,
)
_LONGEST_SECRET_NAME = 80
_DENIED = frozenset({PolicyDenied.code, Denied.code, ApprovalRequired.code, ApprovalsWaiting.code})
_UNASKED: JsonObject = {}
_NOT_KEPT = "not kept: they may hold a secret"
_TOO_LONG = "not kept: they are too long"


class Witness:
    """Whoever sees a call from its request to its end; `level` says how much of it the owner wants to be told."""

    def __init__(self, action: str, payload: JsonObject, surface: str, level: Callable[[], AuditLevel]) -> None:
        self.is_heard = False
        """Whether its receipt was given for the run that the call left, and so must not be written again."""
        self.is_of_look = action in _SEARCHES
        """Whether the call changed nothing."""
        self.is_of_trust = action in _GIVES_TRUST or (action == "migrate" and payload.get("sign") is True)
        """Whether the call is not to happen without a receipt; what takes trust away never waits for one."""
        self._action = action
        self._payload = payload
        self._surface = surface
        self._level = level
        self._began = time.time_ns() // 1_000_000

    def of_run(
        self, run: Run, secrets: Mapping[str, str] | None, outcome: bytes | None, passed: JsonObject = _UNASKED
    ) -> Receipt:
        """Return the receipt of a call that left a run.

        `secrets` are those of the plan, None where the call was refused before they were known: then its arguments
        may hold one of them. `outcome` is what came of it, without secrets already; `passed` names the rule or the
        approval of the owner's that it went on by.
        """
        self.is_heard = True
        level = self._level()
        arguments = None if level == "minimal" or secrets is None else self._arguments(secrets)
        told: JsonObject = {"project": run.project, **({"message": run.message} if run.message else {}), **passed}
        return Receipt(
            id=run.id,
            at=run.started_at,
            actor=run.actor,
            surface=self._surface,
            action=self._action,
            item=run.tool_id,
            status=run.status,
            level=level,
            code=run.code,
            identity=run.identity,
            digest=run.digest,
            plan_digest=run.plan_digest,
            verdict="deny" if run.code in _DENIED else "allow" if run.plan_digest else "",
            arguments_sha256=sha256_hex(arguments) if arguments is not None else "",
            outcome_sha256=sha256_hex(outcome) if outcome is not None and level != "minimal" else "",
            duration_ms=run.duration_ms,
            cost_micros=run.cost_micros,
            detail=_detail(told, arguments, secrets or {}) if level == "verbose" else compact(passed) if passed else "",
        )

    def of_answer(self, actor: str, status: RunStatus, answer: JsonObject) -> Receipt:
        """Return the receipt of a call that left no run, from what was answered to it."""
        level, code = self._level(), as_text(answer.get("code"))
        arguments = None if level == "minimal" else self._arguments({})
        run_id, at = new_run(self._began)
        return Receipt(
            id=run_id,
            at=at,
            actor=actor,
            surface=self._surface,
            action=self._action,
            item=self._item() or as_text(answer.get("tool_id")),
            status=status,
            level=level,
            code=code,
            identity=as_text(answer.get("identity")),
            digest=as_text(answer.get("digest")) or as_text(answer.get("hash")),
            verdict="deny" if code in _DENIED else "allow" if status == "success" else "",
            arguments_sha256=sha256_hex(arguments) if arguments is not None else "",
            duration_ms=max(0, time.time_ns() // 1_000_000 - self._began),
            detail=_word_of(answer),
        )

    def _item(self) -> str:
        """Return the short name of what a request is about, as far as it names anything."""
        named = {**as_object(self._payload.get("parameters")), **self._payload}
        for word in _NAMES:
            if text := as_text(named.get(word)):
                return masked(short(text) if word == "item_id" else text)[:_LONGEST_NAME]
        return ""

    def _arguments(self, secrets: Mapping[str, str]) -> bytes | None:
        """Return the canonical arguments; None where they may hold a secret, which could be guessed from a hash.

        Of all verbs `execute` alone has `parameters`, and those that look have a need or a name; what the others are
        told is not kept, as it may be anything.
        """
        try:
            data = canonical(self._payload if self.is_of_look else self._payload["parameters"])
        except (KeyError, InvalidRequest):
            return None
        text = data.decode() if secrets else ""
        return None if names_secret(data) or redact(text, secrets) != text else data


def names_secret(data: bytes) -> bool:
    """Whether a key in some JSON, or what looks like one, says that its value is a secret."""
    # From the end of each key back to its beginning: a long text between two keys is not gone through letter by letter.
    keys = (before.rpartition(b'"')[2] for before in data.split(b'":')[:-1])
    return any(_SECRET_NAME.search(key[-_LONGEST_SECRET_NAME:]) for key in keys)


def _word_of(answer: JsonObject) -> str:
    """Return what the owner took although nobody vouches for it, as JSON; that is kept at every level."""
    taken = as_list(answer.get("acknowledged"))
    text = compact({"acknowledged": taken}) if taken else ""
    return text if len(text) <= LONGEST else compact({"acknowledged": len(taken)})


def _detail(told: JsonObject, arguments: bytes | None, secrets: Mapping[str, str]) -> str:
    """Return more words as JSON that can be kept whole: without the arguments, or none, where they are too long."""
    sent: Json = _NOT_KEPT if arguments is None else json.loads(arguments)
    for one in (sent, _TOO_LONG):
        text = redact(compact({**told, "arguments": one}), secrets)
        if len(text) <= LONGEST:
            return text
    return ""


def recorded(verb: str, payload: JsonObject) -> str:
    """Return the word under which a request is written down; empty where it is not."""
    return changes(verb, payload) or (verb if verb in _SEARCHES else "")


def changes(verb: str, payload: JsonObject) -> str:
    """Return the word for what a request would run or change; empty where it only looks."""
    known = BY_NAME.get(verb)
    if known is None or known.is_read_only or payload.get("dry_run") is True:
        return ""
    match verb:
        case "execute":
            action = as_text(payload.get("action", "run"))
            return ("" if action in _LOOKS else action) if action in ACTIONS else verb
        case "load":
            return "copy" if payload.get("destination") else ""
        case "migrate":
            return "migrate" if payload.get("apply") else ""
        case _:
            return _change_of(verb, payload)


def _change_of(verb: str, payload: JsonObject) -> str:
    """Return a verb and its action; the verb alone where it has none, or is asked for one that it has not."""
    field = BY_NAME[verb].request.model_fields.get("action")
    if field is None:
        return verb
    action = as_text(payload.get("action", field.default))
    if action in _LOOKS:
        return ""
    return f"{verb} {action}" if action.isidentifier() and len(action) < _LONGEST_NAME else verb
