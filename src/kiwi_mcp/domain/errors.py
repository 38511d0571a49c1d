"""The errors of Kiwi, one family, grouped by the next step of the caller.

Nothing ran: raise one of these. Something ran: return an `Outcome`.

KiwiError
├── NotFound            look elsewhere, or create it
│   ├── ToolNotFound
│   ├── VersionNotFound
│   ├── MissingLink
│   ├── RunNotFound
│   ├── ThreadNotFound
│   ├── ApprovalNotFound
│   ├── RemoteNotFound
│   ├── TopicNotFound
│   └── VerbNotFound
├── Invalid             fix what was sent
│   ├── InvalidManifest
│   ├── InvalidArguments
│   ├── InvalidRequest
│   ├── InvalidProgram
│   ├── ProjectPathRequired
│   ├── ProjectPathInvalid
│   ├── PathInvalid
│   ├── ReservedPath
│   ├── TooLarge
│   ├── NotCallable
│   ├── ChainCycle
│   ├── ChainTooDeep
│   └── ChainMistyped
├── Untrusted           look at what changed, then sign again
│   ├── IntegrityMismatch
│   ├── LockMismatch
│   ├── ArtifactRefused
│   ├── PackageChanged
│   ├── SignatureRefused
│   ├── DefinitionChanged
│   └── DefinitionNew
├── Denied              ask the owner
│   ├── PolicyDenied
│   ├── AddressDenied
│   ├── SecretNotGranted
│   ├── ApprovalRequired
│   ├── ApprovalsWaiting
│   ├── BudgetExceeded
│   ├── NamespaceDenied
│   ├── Unacknowledged
│   └── TokenRefused
│       ├── TokenExpired
│       └── TooManyTries
├── Unavailable         provide what is missing, or try later
│   ├── RateLimited
│   ├── Unanswered
│   ├── LoginRequired
│   ├── CommandMissing
│   ├── IsolationUnavailable
│   ├── VariableMissing
│   ├── ProviderNotChosen
│   ├── EnvironmentFailed
│   ├── BuildFailed
│   ├── DriverMissing
│   ├── RequestFailed
│   │   └── TooSlow
│   ├── ModelFailed
│   ├── StoreUnavailable
│   ├── StoreDamaged
│   └── StoreNewer
├── Conflict            choose another name, or say that you mean it
│   ├── AlreadyExists
│   ├── VersionConflict
│   ├── VersionSealed
│   ├── ReservedName
│   ├── LeaseLost
│   ├── ThreadTaken
│   ├── RecoveryLimit
│   ├── ThreadEnded
│   └── ThreadWaiting
├── ToolFailed          look at the tool's message and logs; only the Python API raises it
└── Internal            report the incident id
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "dbos": ("dbos>=3.3,<4",),
    "keyring": ("keyring>=25,<26",),
    "otel": ("opentelemetry-sdk>=1.30,<2", "opentelemetry-exporter-otlp-proto-http>=1.30,<2"),
    "postgres": ("psycopg[binary]>=3.2,<4",),
}
"""The packages of each extra, as `pyproject.toml` lists them."""


class KiwiError(Exception):
    """What happened, and what to do next."""

    code: ClassVar[str] = "error"
    error: ClassVar[str] = "Error"
    http_status: ClassVar[int] = 400
    exit_code: int = 1

    def __init__(self, message: str, *, suggestion: str, **details: Json) -> None:
        super().__init__(message)
        self.message = message
        self.suggestion = suggestion
        self.details = details

    def to_response(self, item_type: str = "tool") -> JsonObject:
        """Return the object every surface answers with."""
        return {
            "error": self.error,
            "code": self.code,
            "item_type": item_type,
            "message": self.message,
            "suggestion": self.suggestion,
            **self.details,
        }


class NotFound(KiwiError):
    """The named thing does not exist."""

    code, error, http_status, exit_code = "not_found", "Not found", 404, 3


class ToolNotFound(NotFound):
    """No source holds an item of that name."""

    code, error = "tool_not_found", "Tool not found"

    def __init__(self, tool_id: str, *, near: Sequence[str] = ()) -> None:
        message = f"No tool named {tool_id!r} in the project, user, registry or built-in catalog, or on an MCP server."
        super().__init__(message, suggestion="", tool_id=tool_id)
        self.tool_id, self.near, self.is_unknown = tool_id, tuple(near), True
        self.suggest(near)

    def suggest(self, names: Sequence[str], *, can_create: bool = True) -> None:
        """Name the items that were perhaps meant; without any, say how to make one."""
        if names:
            self.suggestion = f"Did you mean {', '.join(f'`{name}`' for name in names)}? If not, search for it."
        elif not can_create:
            self.suggestion = "Search for it. It may be there and not be permitted to you: ask the owner."
        else:
            self.suggestion = f"Search for it, or create .ai/tools/{self.tool_id}.yaml."


class VersionNotFound(NotFound):
    """The item is here, in another version."""

    code, error = "version_not_found", "Version not found"

    def __init__(self, tool_id: str, wanted: str, *, found: Sequence[str]) -> None:
        message = f"{tool_id!r} is here as {', '.join(found)}; {wanted!r} was asked for."
        suggestion = "Ask for a version that is here, or change the version in the item's manifest."
        super().__init__(message, suggestion=suggestion, tool_id=tool_id, found=list(found))


class MissingLink(NotFound):
    """An executor on the way down does not exist."""

    code, error = "executor_not_found", "Executor not found"

    def __init__(self, executor: str, *, chain: Sequence[str], reason: str = "") -> None:
        super().__init__(
            f"{chain[-1]!r} runs on {executor!r}, which is not in any catalog{reason}: "
            f"{draw(chain)} → {executor} (missing).",
            suggestion=f"Create {executor!r}, or set `executor` of {chain[-1]!r} to one that exists.",
            chain=[*chain, executor],
        )


class RunNotFound(NotFound):
    """The store holds no run of that id."""

    code, error = "run_not_found", "Run not found"

    def __init__(self, run_id: str) -> None:
        suggestion = "List runs with `kiwi runs`; old ones are removed as new ones come."
        super().__init__(f"No run {run_id!r} is recorded here.", suggestion=suggestion, run_id=run_id)


class ThreadNotFound(NotFound):
    """The store holds no thread, or no question of a thread, of that id."""

    code, error = "thread_not_found", "Thread not found"

    def __init__(self, wanted: str, *, what: str = "thread", is_several: bool = False) -> None:
        message = f"{wanted[:40]!r} is {f'the beginning of several ids of {what}s' if is_several else f'no {what}'}."
        super().__init__(message, suggestion="List threads with `kiwi thread list`, and name one by its id.")


class ApprovalNotFound(NotFound):
    """No question, or no rule, of that id waits for this owner."""

    code, error = "approval_not_found", "Approval not found"

    def __init__(self, wanted: str, *, what: str = "question", is_several: bool = False) -> None:
        listed = "kiwi approvals rules" if what == "rule" else "kiwi approvals list --all"
        message = f"{wanted[:40]!r} is {f'the beginning of several {what}s' if is_several else f'no {what} of yours'}."
        super().__init__(message, suggestion=f"List them with `{listed}`, and name one by its id.")


class RemoteNotFound(NotFound):
    """No remote registry of that name is known."""

    code, error = "remote_not_found", "Remote not found"

    def __init__(self, remote: str, *, remotes: Sequence[str]) -> None:
        known = f"Known here: {', '.join(remotes)}. " if remotes else ""
        super().__init__(
            f"{remote!r} is neither a remote of this installation nor the address of one.",
            suggestion=f"{known}Give a folder as `./{remote}`, an address (`http(s)://…`), or add one with "
            "`kiwi registry add NAME URL`."
            if "/" not in remote
            else f"{known}Give a folder, or an address (`http(s)://…`).",
            remotes=list(remotes),
        )


class TopicNotFound(NotFound):
    """Help has no page of that name."""

    code, error = "topic_not_found", "Topic not found"

    def __init__(self, topic: str, *, topics: Sequence[str]) -> None:
        super().__init__(
            f"No help on {topic!r}.", suggestion=f"Ask for one of: {', '.join(topics)}.", topics=list(topics)
        )


class VerbNotFound(NotFound):
    """Kiwi has no verb of that name."""

    code, error = "verb_not_found", "Verb not found"

    def __init__(self, verb: str, *, verbs: Sequence[str]) -> None:
        suggestion = f"Use one of: {', '.join(verbs)}."
        super().__init__(f"Kiwi has no verb {verb!r}.", suggestion=suggestion, verbs=list(verbs))


class Invalid(KiwiError):
    """The input is invalid."""

    code, error, http_status, exit_code = "invalid", "Invalid", 400, 4


class InvalidManifest(Invalid):
    """The manifest of an item has issues; all of them are listed."""

    code, error = "invalid_manifest", "Invalid metadata"

    def __init__(self, what: str, issues: Iterable[Issue]) -> None:
        self.issues = tuple(issues)
        message = listing(f"{what} has", self.issues)
        suggestion = "Fix each issue as its `fix` says, then validate again."
        super().__init__(message, suggestion=suggestion, issues=[issue.to_json() for issue in self.issues])


class InvalidArguments(Invalid):
    """Parameters do not match the schema of the tool; all issues are listed."""

    code, error = "invalid_input", "Invalid parameters"

    def __init__(self, tool_id: str, issues: Iterable[Issue], schema: JsonObject | None = None) -> None:
        self.issues = tuple(issues)
        shown = {"parameters_schema": schema} if schema else {}
        super().__init__(
            listing(f"The parameters for {tool_id!r} have", self.issues),
            suggestion="Send `parameters` as `parameters_schema` says."
            if shown
            else f"Load {tool_id!r} to see its parameters, then send them as its schema says.",
            tool_id=tool_id,
            issues=[issue.to_json() for issue in self.issues],
            **shown,
        )


class InvalidRequest(Invalid):
    """A verb was called with invalid arguments."""

    code, error = "invalid_request", "Invalid request"


class InvalidProgram(Invalid):
    """A program of code mode does not fit the tools that it calls, or cannot be read; nothing of it ran."""

    code, error = "invalid_program", "Invalid program"

    def __init__(self, reason: str) -> None:
        super().__init__(
            reason,
            suggestion="`await` every call, pass arguments by name, and end with the result as an expression; "
            "`help` with topic `code` has examples.",
        )


class ProjectPathRequired(Invalid):
    """The request names no project and this server has no default one."""

    code, error = "project_path_required", "project_path is required"

    def __init__(self) -> None:
        super().__init__(
            "The request does not say which project it is about.", suggestion='Add `project_path: "/absolute/path"`.'
        )


class ProjectPathInvalid(Invalid):
    """The project path is not a folder that Kiwi may use."""

    code, error = "project_path_invalid", "project_path is not usable"


class PathInvalid(Invalid):
    """A path does not lead to a file or a folder below the one that a tool works in."""

    code, error = "path_invalid", "Invalid path"

    def __init__(self, path: str, reason: str) -> None:
        suggestion = "Write a path such as `notes/tea.md`, without links."
        super().__init__(f"{path!r:.200} {reason}.", suggestion=suggestion, path=path[:200])


class ReservedPath(Invalid):
    """A path of the memory or of a project that only the owner changes."""

    code, error, http_status = "reserved_path", "Reserved path", 403

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path!r:.200} is reserved: names that begin with a dot, and the owner's settings, are not used by tools.",
            suggestion="Choose another path; the owner changes settings with an editor.",
            path=path[:200],
        )


class TooLarge(Invalid):
    """Something is over a documented limit."""

    code, error, http_status = "too_large", "Too large", 413

    def __init__(self, what: str, *, size: int | None, limit: int, unit: str = "bytes") -> None:
        measured = f"{size:,} {unit}" if size is not None else "too much"
        suggestion = "Send less, or pass a file's path and let the tool read it."
        super().__init__(f"{what} is {measured}; the limit is {limit:,} {unit}.", suggestion=suggestion, limit=limit)


class NotCallable(Invalid):
    """The item exists and cannot be run."""

    code, error = "not_callable", "Not callable"

    def __init__(self, tool_id: str, tool_type: str, why: str, *, instead: Sequence[str] = ()) -> None:
        named = f", such as {', '.join(f'`{name}`' for name in instead)}" if instead else ""
        suggestion = f"Load it to read it, or run an item that uses it{named}."
        super().__init__(f"{tool_id!r} is a {tool_type}: {why}.", suggestion=suggestion, tool_id=tool_id)


class ChainCycle(Invalid):
    """A chain of executors has a cycle."""

    code, error = "chain_cycle", "Executor cycle"

    def __init__(self, chain: Sequence[str]) -> None:
        suggestion = f"Let {chain[-2]!r} run on something that ends in `subprocess` or `http_client`."
        super().__init__(f"The executors form a cycle: {draw(chain)}.", suggestion=suggestion, chain=list(chain))


class ChainTooDeep(Invalid):
    """A chain has more links than the limit."""

    code, error = "chain_too_deep", "Executor chain too deep"

    def __init__(self, chain: Sequence[str], *, limit: int) -> None:
        message = f"The chain has more than {limit} links: {draw(chain)} → …"
        suggestion = "Remove links: most tools need two below them."
        super().__init__(message, suggestion=suggestion, chain=list(chain), limit=limit)


class ChainMistyped(Invalid):
    """A link has a type that is not allowed in its place."""

    code, error = "chain_mistyped", "Wrong executor type"

    def __init__(self, chain: Sequence[str], *, reason: str, suggestion: str) -> None:
        super().__init__(f"{reason}: {draw(chain)}.", suggestion=suggestion, chain=list(chain))


class Untrusted(KiwiError):
    """The content is not the trusted one."""

    code, error, http_status, exit_code = "untrusted", "Untrusted", 403, 5


class IntegrityMismatch(Untrusted):
    """A signed item was changed after it was signed."""

    code, error = "content_hash_mismatch", "Content hash mismatch"

    def __init__(self, tool_id: str, *, expected: str, actual: str, where: str) -> None:
        message = f"{tool_id!r} was changed after it was signed ({where})."
        suggestion = f"Look at what changed. If it is right, the owner signs again: `kiwi sign {tool_id}`."
        super().__init__(message, suggestion=suggestion, tool_id=tool_id, expected=expected, actual=actual)


class LockMismatch(Untrusted):
    """The chain is not the one the lockfile recorded."""

    code, error = "lock_mismatch", "Lockfile mismatch"

    def __init__(self, tool_id: str, changes: Sequence[str]) -> None:
        message = f"{tool_id!r} no longer has the chain in the lockfile: {'; '.join(changes)}."
        suggestion = "Look at what changed, then sign the tool again to record it, or run without --frozen."
        super().__init__(message, suggestion=suggestion, tool_id=tool_id, changes=list(changes))


class ArtifactRefused(Untrusted):
    """The content of an artifact does not match its description; nothing of it was stored."""

    code, error = "artifact_refused", "Artifact refused"

    def __init__(self, what: str, issues: Iterable[Issue]) -> None:
        self.issues = tuple(issues)
        message = listing(f"{what} was refused as a whole:", self.issues)
        suggestion = "Do not use it. Ask its publisher for a clean copy, or take it from a registry you trust."
        super().__init__(message, suggestion=suggestion, issues=[issue.to_json() for issue in self.issues])


class PackageChanged(Untrusted):
    """An index offers other bytes for a package than those that were locked."""

    code, error = "package_changed", "Package changed"

    def __init__(self, packages: Sequence[str], *, lock: str, said: str) -> None:
        message = f"A package is not the one that was locked, so nothing was installed. {said}"
        suggestion = f"Find out who changed it at the index; if the change is right, renew or remove {lock}."
        super().__init__(message, suggestion=suggestion, packages=list(packages), lock=lock)


class SignatureRefused(Untrusted):
    """A signature is forged, gone, by a revoked key or by another key than its publisher's, or of an old version."""

    code, error = "signature_refused", "Signature refused"


class DefinitionChanged(Untrusted):
    """An MCP server changed the definition of an item after the owner accepted it."""

    code, error = "definition_changed", "Definition changed"

    def __init__(self, identity: str, *, server: str, tool_id: str, diff: str) -> None:
        super().__init__(
            f"The MCP server {server!r} describes {tool_id!r} otherwise than when it was accepted, so it is not run.",
            suggestion=f"Look at the change (`kiwi mcp diff {server} {tool_id}`). If it is right, the owner types "
            f"`kiwi mcp accept {server} {tool_id}`.",
            tool_id=tool_id,
            identity=identity,
            diff=diff,
        )


class DefinitionNew(Untrusted):
    """An MCP server offers an item that the owner has not accepted yet."""

    code, error = "definition_new", "Definition not accepted"

    def __init__(self, identity: str, *, server: str, tool_id: str) -> None:
        message = f"The MCP server {server!r} offers {tool_id!r}, and the owner has not accepted it yet."
        suggestion = f"Look at it (`kiwi load {identity}`). The owner types `kiwi mcp accept {server} {tool_id}`."
        super().__init__(message, suggestion=suggestion, tool_id=tool_id, identity=identity)


class Denied(KiwiError):
    """The owner's rules do not allow it."""

    code, error, http_status, exit_code = "denied", "Denied", 403, 6


class PolicyDenied(Denied):
    """A rule of the owner's policy refuses the call."""

    code, error = "not_permitted", "Not permitted"


class AddressDenied(Denied):
    """The request would go to an address that is not public and was not granted."""

    code, error = "address_denied", "Address not permitted"


class SecretNotGranted(Denied):
    """A secret is not granted to the item, the host or the form that asks for it, or the item may have no variables."""

    code, error = "secret_not_granted", "Secret not granted"


class ApprovalRequired(Denied):
    """The owner must approve first; the question is stored, and nothing was done."""

    code, error = "approval_required", "Approval required"

    def __init__(self, tool_id: str, *, approval_id: str, number: int, reasons: Sequence[str], expires_at: str) -> None:
        super().__init__(
            f"{tool_id!r} waits for the owner, since it {'; '.join(reasons)}. Nothing was done.",
            suggestion=f"The owner looks at it with `kiwi approvals show {number}` and types "
            f"`kiwi approvals approve {number}`, with `--run` to run it at once; else call it again then, exactly "
            "as before.",
            tool_id=tool_id,
            approval_id=approval_id,
            number=number,
            reasons=list(reasons),
            expires_at=expires_at,
        )


class ApprovalsWaiting(Denied):
    """Too many questions wait for the owner, or they come too fast; no more are asked."""

    code, error = "approvals_waiting", "Too many questions"

    def __init__(self, waiting: int) -> None:
        super().__init__(
            f"{waiting} question{'s' * (waiting != 1)} of yours wait{'s' * (waiting == 1)} for the owner, and no more "
            "are asked now. Nothing was done.",
            suggestion="Stop, and let the owner answer: `kiwi approvals list` shows what waits.",
            waiting=waiting,
        )


class BudgetExceeded(Denied):
    """A limit of a thread does not allow it."""

    code, error = "budget_exceeded", "Budget exceeded"

    def __init__(self, limit: str, *, wanted: int, rest: int) -> None:
        message = f"The limit `{limit}` of the thread allows {rest:,} more, and {wanted:,} are wanted."
        suggestion = f"Use less, or let the owner raise `{limit}` of the thread."
        super().__init__(message, suggestion=suggestion, limit=limit, wanted=wanted, rest=rest)


class NamespaceDenied(Denied):
    """The actor does not belong to the namespace."""

    code, error = "namespace_denied", "Namespace not permitted"

    def __init__(self, namespace: str, *, namespaces: Sequence[str]) -> None:
        super().__init__(
            f"You do not belong to the namespace {namespace!r}.",
            suggestion=f"Yours: {', '.join(namespaces) or 'none yet'}. They are listed under `namespaces` in "
            "registry.yaml of the user space, or belong to the token; publish and push take one as `--namespace`.",
            namespaces=list(namespaces),
        )


class Unacknowledged(Denied):
    """The release has no trusted signature, and the owner did not acknowledge that."""

    code, error = "acknowledgement_required", "Acknowledgement required"


class TokenRefused(Denied):
    """The token of a request is missing, unknown, or does not allow it."""

    code, error, http_status = "token_refused", "Token refused", 401


class TokenExpired(TokenRefused):
    """A token with a valid signature of its issuer that has expired: the client has to renew it."""

    code, error = "token_expired", "Token expired"


class TooManyTries(TokenRefused):
    """Wrong tokens arrive too fast."""

    code, error, http_status = "too_many_tries", "Too many tries", 429


class Unavailable(KiwiError):
    """Something that the call needs is not available now."""

    code, error, http_status, exit_code = "unavailable", "Unavailable", 503, 7


class RateLimited(Unavailable):
    """A rule of the owner allows no more calls in this minute."""

    code, error, http_status = "rate_limited", "Rate limited", 429

    def __init__(self, tool_id: str, rule: str, seconds: float) -> None:
        wait = math.ceil(seconds)
        suggestion = f"Call it again in {wait} seconds, or do something else meanwhile."
        super().__init__(f"{tool_id!r} was not run: {rule}.", suggestion=suggestion, tool_id=tool_id, retry_after=wait)


class Unanswered(Unavailable):
    """A call asks a question that its caller cannot be asked, or has not answered."""

    code, error = "unanswered", "Question not answered"

    def __init__(self, methods: Sequence[str], *, message: str = "", suggestion: str = "") -> None:
        super().__init__(
            message or f"The tool asks a question ({', '.join(methods)}), and the caller cannot answer it.",
            suggestion=suggestion
            or "Call it with parameters that leave no question open, or from a client that can be asked.",
            asked=list(methods),
        )


class LoginRequired(Unavailable):
    """A server requires a login, or more scopes."""

    code, error = "login_required", "Login required"

    def __init__(self, name: str, identity: str) -> None:
        message = f"The MCP server {name!r} wants its owner to log in, or to allow more than before."
        suggestion = f"The owner types `kiwi mcp login {name}`; then call it again."
        super().__init__(message, suggestion=suggestion, server=identity)


class CommandMissing(Unavailable):
    """A program that a runtime starts is not installed."""

    code, error = "command_not_found", "Command not found"

    def __init__(self, command: str, *, needed_by: str, install: str = "") -> None:
        message = f"{needed_by!r} starts `{command}`, which is not on this machine's PATH."
        suggestion = install or f"Install `{command}`, or change `config.command` of {needed_by!r}."
        super().__init__(message, suggestion=suggestion, command=command)


class IsolationUnavailable(Unavailable):
    """The isolation that a tool requires is missing on this machine or failed; the tool was not run."""

    code, error = "isolation_unavailable", "Isolation unavailable"


class VariableMissing(Unavailable):
    """A declared variable has no value anywhere."""

    code, error = "variable_missing", "Variable not set"

    def __init__(self, names: Sequence[str], *, needed_by: str) -> None:
        listed = ", ".join(f"${{{name}}}" for name in names)
        message = f"{needed_by!r} needs {listed}, which is set nowhere."
        suggestion = f"Set it in the environment, or add `{names[0]}=…` to the project's .env or to ~/.ai/.env."
        super().__init__(message, suggestion=suggestion, variables=list(names))


class ProviderNotChosen(Unavailable):
    """No provider of models is named, and none or several are configured."""

    code, error = "provider_not_chosen", "No model provider chosen"

    def __init__(self, configured: Sequence[str], *, presets: Sequence[str]) -> None:
        listed = f"Configured: {', '.join(configured)}." if configured else "None is configured."
        chosen = "Name one with `--model PROVIDER/MODEL`, or for every thread with `provider_adapter: PROVIDER` in"
        others = f"Presets and the keys that they need in ~/.ai/.env: {', '.join(presets)}."
        super().__init__(
            f"No provider of models is chosen. {listed}", suggestion=f"{chosen} ~/.ai/config.yaml. {others}"
        )


class EnvironmentFailed(Unavailable):
    """The dependencies of a tool could not be installed."""

    code, error = "environment_failed", "Dependencies not installed"


class BuildFailed(Unavailable):
    """A compiled tool did not compile."""

    code, error = "build_failed", "Build failed"


class DriverMissing(Unavailable):
    """This version of Kiwi has no driver for that type of item."""

    code, error = "driver_missing", "No driver"

    def __init__(self, tool_id: str, driver: str) -> None:
        message = f"{tool_id!r} needs the driver `{driver}`, which this version of Kiwi does not have."
        suggestion = "The item can be validated, searched, loaded and signed; running it needs a newer Kiwi."
        super().__init__(message, suggestion=suggestion, tool_id=tool_id, driver=driver)


class RequestFailed(Unavailable):
    """A request could not be made at all."""

    code, error = "request_failed", "Request failed"


class TooSlow(RequestFailed):
    """A body did not arrive in time."""

    code, error, http_status = "too_slow", "Too slow", 408


class ModelFailed(Unavailable):
    """A model gave no usable answer; `kind` is the class of the failure in `data/model_errors.yaml`."""

    code, error = "model_failed", "Model failed"

    def __init__(self, message: str, *, suggestion: str, kind: str, is_lost: bool = False, **details: Json) -> None:
        super().__init__(message, suggestion=suggestion, kind=kind, **details)
        self.kind = kind
        self.is_lost = is_lost
        """Whether the model may have answered, so that the request may have cost something."""


class StoreUnavailable(Unavailable):
    """The store cannot be reached, read or written now; nothing was lost."""

    code, error = "store_unavailable", "Store unavailable"


class StoreDamaged(Unavailable):
    """The store's file is damaged."""

    code, error = "store_damaged", "Store damaged"


class StoreNewer(Unavailable):
    """The store was written by a newer Kiwi and is not changed."""

    code, error = "store_newer", "Store is newer"

    def __init__(self, url: str, *, found: int, known: int) -> None:
        message = f"The store {url} has schema {found}; this Kiwi knows schemas up to {known}."
        suggestion = "Use the newer Kiwi that wrote it, or name another store in registry.yaml. Nothing was changed."
        super().__init__(message, suggestion=suggestion, found=found, known=known)


class Conflict(KiwiError):
    """The name is taken."""

    code, error, http_status, exit_code = "conflict", "Conflict", 409, 8


class AlreadyExists(Conflict):
    """Create found an item of that name."""

    code, error = "already_exists", "Already exists"

    def __init__(self, tool_id: str, *, path: str) -> None:
        suggestion = "Change it (edit the file, or `action: update`), delete it first, or choose another name."
        super().__init__(f"{tool_id!r} exists already ({path}).", suggestion=suggestion, tool_id=tool_id, path=path)


class VersionConflict(Conflict):
    """The version is published already, with other content or on another executor."""

    code, error = "version_conflict", "Version conflict"

    def __init__(self, conflicts: Sequence[str]) -> None:
        names = ", ".join(conflicts[:10]) + (f" and {len(conflicts) - 10} more" if len(conflicts) > 10 else "")  # noqa: PLR2004 - ten fit in a sentence
        super().__init__(
            f"Published already, with other content or on another executor: {names}. "
            "A published version never changes.",
            suggestion="Give the changed item a new version (`version:` in its manifest), then publish that.",
            conflicts=list(conflicts),
        )


class VersionSealed(Conflict):
    """A published version is neither changed nor deleted."""

    code, error = "version_sealed", "Version is sealed"

    def __init__(self, name: str) -> None:
        message = f"{name} is published, and what is published stays as it is."
        suggestion = "Publish a new version, or yank this one, so that it is no longer selected."
        super().__init__(message, suggestion=suggestion, name=name)


class ReservedName(Conflict):
    """The name belongs to a built-in, which always wins."""

    code, error = "reserved_name", "Reserved name"

    def __init__(self, tool_id: str) -> None:
        message = f"{tool_id!r} is built in, and a built-in link is never replaced."
        suggestion = f"Choose another name, such as `my_{tool_id}`, and name that as the executor."
        super().__init__(message, suggestion=suggestion, tool_id=tool_id)


class LeaseLost(Conflict):
    """Another process runs the thread now; this one wrote nothing."""

    code, error = "lease_lost", "Lease lost"

    def __init__(self, thread_id: str) -> None:
        message = f"Another process runs the thread {thread_id}, or has added to it. Nothing was written."
        suggestion = f"Stop this run; `kiwi thread watch {thread_id}` shows the other one."
        super().__init__(message, suggestion=suggestion, thread_id=thread_id)


class ThreadTaken(Conflict):
    """Another process runs the thread already."""

    code, error = "thread_taken", "Thread is running"

    def __init__(self, thread_id: str) -> None:
        suggestion = f"Watch it with `kiwi thread watch {thread_id}`, or try again when that process has ended."
        super().__init__(f"Another process runs the thread {thread_id}.", suggestion=suggestion, thread_id=thread_id)


class RecoveryLimit(Conflict):
    """A thread was taken over too often from processes that died."""

    code, error = "recovery_limit", "Recovered too often"

    def __init__(self, thread_id: str, most: int) -> None:
        message = f"The processes that ran the thread {thread_id} died more than {most} times."
        suggestion = "Find out what ends them, such as a tool that uses all memory, then start the thread again."
        super().__init__(message, suggestion=suggestion, thread_id=thread_id)


class ThreadEnded(Conflict):
    """The thread has ended, and nothing can be added to it."""

    code, error = "thread_ended", "Thread has ended"

    def __init__(self, thread_id: str, status: str) -> None:
        message = f"The thread {thread_id} has ended: {status}."
        suggestion = f"Look at it with `kiwi thread show {thread_id}`, or start a new one."
        super().__init__(message, suggestion=suggestion, thread_id=thread_id, status=status)


class ThreadWaiting(Conflict):
    """A call of a thread that has no result yet: it waits for an answer or for child threads."""

    code, error, exit_code = "thread_waiting", "Thread waits", 9

    def __init__(
        self, reason: str, *, waits_for: str, question_id: str = "", approvals: Sequence[str] = (), thread_id: str = ""
    ) -> None:
        is_start = waits_for == "start"
        steps = [f"`kiwi thread answer {question_id} {'continue' if is_start else 'ANSWER'}`"] if question_id else []
        steps += [f"`kiwi approvals approve {one}`" for one in approvals]
        shown = f"`kiwi thread watch {thread_id}` shows its program. " if is_start else ""
        super().__init__(
            reason,
            suggestion=f"{shown}The owner types {' and '.join(steps)}." if steps else "Wait for its children.",
            waits_for=waits_for,
            question_id=question_id,
            approvals=list(approvals),
            thread_id=thread_id,
        )
        if waits_for == "approval":
            self.exit_code = Denied.exit_code  # as for any call that needs one


class ToolFailed(KiwiError):
    """The tool ran and did not succeed; `answer` is the whole answer, with its logs."""

    code, error, http_status, exit_code = "execution_failed", "Execution failed", 422, 1

    def __init__(self, answer: JsonObject) -> None:
        message, suggestion = answer.get("message"), answer.get("suggestion")
        super().__init__(str(message), suggestion=str(suggestion), tool_id=answer.get("tool_id"))
        self.answer = answer


class Internal(KiwiError):
    """An internal error of Kiwi."""

    code, error, http_status, exit_code = "internal", "Internal error", 500, 70

    def __init__(self, incident: str) -> None:
        message = f"Something went wrong inside Kiwi (incident {incident})."
        suggestion = "The log holds the details under this incident id; please report it."
        super().__init__(message, suggestion=suggestion, incident=incident)


def draw(chain: Sequence[str]) -> str:
    """Return a chain on one line."""
    return " → ".join(chain)


def listing(subject: str, issues: Sequence[Issue]) -> str:
    """Return one sentence that counts and quotes the issues."""
    quoted = "; ".join(f"{issue.place}: {issue.reason}" if issue.place else issue.reason for issue in issues[:10])
    more = f"; and {len(issues) - 10} more" if len(issues) > 10 else ""  # noqa: PLR2004 - ten fit in a sentence
    return f"{subject} {len(issues)} issue{'s' if len(issues) != 1 else ''}: {quoted}{more}."


def install_line(extra: str) -> str:
    """Return the command that installs an extra for the Python that runs this."""
    packages = " ".join(f"'{package}'" for package in EXTRAS[extra])
    return f"`{sys.executable} -m uv pip install {packages}`"
