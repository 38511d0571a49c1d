"""Witnesses: each sees one call through and gives its receipt, in which nothing secret stands."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace

from kiwi_mcp.domain.errors import InvalidRequest, PolicyDenied
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, compact
from kiwi_mcp.domain.receipt import AuditLevel, Decision, Receipt
from kiwi_mcp.domain.run import Run, RunStatus
from kiwi_mcp.kernel.requests import ACTIONS
from kiwi_mcp.kernel.runs import short
from kiwi_mcp.kernel.verbs import BY_NAME
from kiwi_mcp.manifest.digest import canonical, sha256_hex
from kiwi_mcp.primitives.secrets import redact
from kiwi_mcp.store.open import masked
from kiwi_mcp.store.plain import LONGEST
from kiwi_mcp.store.runs import new_run

_LOOKS = frozenset({"list", "show", "why", "validate", "versions", "diff", "verify", "export"})
"""Actions that change nothing. What is not among them is written down, so that a new one cannot be forgotten."""
_NAMES = ("item_id", "server", "name", "remote", "task_id", "run_id", "path", "client")
"""The words by which requests name what they are about, the most telling first."""
_LONGEST_NAME = 200
_SECRET_NAME = re.compile(
    rb"""(?i)(?:passw|passphrase|secret|token|api[_-]?key|credential|authorization|private[_-]?key|cookie)[^"]{0,60}":"""
)
_DENIED = PolicyDenied.code
_NOT_KEPT = "not kept: a name among them says that they hold a secret"


class Witness:
    """Whoever sees a call from its request to its end."""

    def __init__(self, action: str, payload: JsonObject, *, actor: str, surface: str, level: AuditLevel) -> None:
        """Begin to watch a call; only items have `parameters`, and of those a hash is kept."""
        self.is_heard = False
        """Whether its receipt was given for the run that the call left, and so must not be written again."""
        self.action = action
        self._payload = payload
        self._actor = actor
        self._surface = surface
        self._level = level
        self._began_ms = time.time_ns() // 1_000_000

    def of_run(self, run: Run, secrets: Mapping[str, str], outcome: bytes | None) -> Receipt:
        """Return the receipt of a call that left a run; `outcome` is what came of it, without secrets already."""
        self.is_heard = True
        decision: Decision = "deny" if run.code == _DENIED else "allow" if run.plan_digest else ""
        receipt = Receipt(
            id=run.id,
            at=run.started_at,
            actor=run.actor,
            surface=self._surface,
            action=self.action,
            item=run.tool_id,
            status=run.status,
            level=self._level,
            code=run.code,
            identity=run.identity,
            digest=run.digest,
            plan_digest=run.plan_digest,
            verdict=decision,
            duration_ms=run.duration_ms,
            cost_micros=run.cost_micros,
        )
        told: JsonObject = {"project": run.project, **({"message": run.message} if run.message else {})}
        return self._detailed(receipt, secrets, outcome, told)

    def of_answer(self, status: RunStatus, answer: JsonObject) -> Receipt:
        """Return the receipt of a call that left no run, from what was answered to it."""
        took, code = time.time_ns() // 1_000_000 - self._began_ms, as_text(answer.get("code"))
        run_id, at = new_run(self._began_ms)
        receipt = Receipt(
            id=run_id,
            at=at,
            actor=self._actor,
            surface=self._surface,
            action=self.action,
            item=self._item() or as_text(answer.get("tool_id")),
            status=status,
            level=self._level,
            code=code,
            identity=as_text(answer.get("identity")),
            digest=as_text(answer.get("digest")) or as_text(answer.get("hash")),
            verdict="deny" if code == _DENIED else "allow" if status == "success" else "",
            duration_ms=max(0, took),
        )
        words: list[Json] = [word[:_LONGEST_NAME] for word in sorted(self._payload)]
        return self._detailed(receipt, {}, None, {"words": words})

    def _item(self) -> str:
        """Return the short name of what a request is about, as far as it names anything."""
        named = {**as_object(self._payload.get("parameters")), **self._payload}
        for word in (*_NAMES, "tool_id"):
            if text := as_text(named.get(word)):
                return masked(short(text) if word == "item_id" else text)[:_LONGEST_NAME]
        return ""

    def _detailed(
        self, receipt: Receipt, secrets: Mapping[str, str], outcome: bytes | None, told: JsonObject
    ) -> Receipt:
        """Return the receipt with as much more as the owner wants."""
        if self._level == "minimal":
            return receipt
        arguments = self._arguments(secrets)
        said = replace(
            receipt,
            arguments_sha256=sha256_hex(arguments) if arguments is not None else "",
            outcome_sha256=sha256_hex(outcome) if outcome is not None else "",
        )
        if self._level == "standard":
            return said
        sent: JsonObject = {"arguments": _NOT_KEPT if arguments is None else self._payload["parameters"]}
        return replace(
            said, detail=_fitting({**told, **(sent if "parameters" in self._payload else {})}, told, secrets)
        )

    def _arguments(self, secrets: Mapping[str, str]) -> bytes | None:
        """Return the canonical arguments; None where they may hold a secret, which could be guessed from a hash."""
        if "parameters" not in self._payload:
            return None
        try:
            data = canonical(self._payload["parameters"])
        except InvalidRequest:
            return None
        text = data.decode() if secrets else ""
        return None if _SECRET_NAME.search(data) or redact(text, secrets) != text else data


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


def _fitting(told: JsonObject, less: JsonObject, secrets: Mapping[str, str]) -> str:
    """Return words as JSON that can be kept whole: fewer of them, or none, where they are too long."""
    for words in (told, {**less, "arguments": "not kept: they are too long"}):
        text = masked(redact(compact(words), secrets))
        if len(text) <= LONGEST and "\0" not in text:
            return text
    return ""
