"""What each verb may be asked, exactly as it may be written."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from kiwi_mcp.domain.approval import ApprovalStatus
from kiwi_mcp.domain.run import RunStatus

Action = Literal[
    "run", "sign", "create", "update", "delete", "validate", "why",
    "publish", "pull", "versions", "diff", "deprecate", "yank", "rollback", "verify", "list",
]  # fmt: skip
ACTIONS: tuple[Action, ...] = get_args(Action)
REGISTRY_ACTIONS: frozenset[Action] = frozenset(
    {"publish", "pull", "versions", "diff", "deprecate", "yank", "rollback", "verify", "list"}
)
"""The actions that are about published versions."""
Where = Literal["project", "user"]
Text = Annotated[str, Field(max_length=4_000)]
Name = Annotated[str, Field(max_length=400)]


def _joined(value: object) -> object:
    return ",".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else value


Names = Annotated[Name | None, BeforeValidator(_joined)]
"""One name or several: `a,b`; a list of them is taken as well."""


class Request(BaseModel):
    """What every verb is asked with."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)


class ProjectRequest(Request):
    """A request about the items a project sees."""

    item_type: Literal["tool", "directive", "knowledge", "output"] = "tool"
    project_path: Annotated[Text | None, Field(description="Absolute path of your project, if any")] = None


class SearchRequest(ProjectRequest):
    """Find items by what they do."""

    query: Annotated[Text, Field(description="One need: verb + object + service")]
    source: Annotated[
        Literal["local", "all", "project", "user", "builtin", "registry", "mcp"],
        Field(description="local = project, user, mcp; all adds registry, builtin"),
    ] = "local"
    limit: Annotated[int, Field(ge=1, le=100)] = 10
    sort_by: Literal["score", "date", "name"] = "score"
    tool_type: Annotated[Names, Field(description="Only these: a,b")] = None
    category: Names = None
    tag: Names = None
    server: Names = None


class LoadRequest(ProjectRequest):
    """Read one item, or copy it to another space."""

    item_id: Annotated[Name, Field(description="Name, name@range or full identity")]
    source: Annotated[
        Literal["project", "user", "builtin", "registry", "mcp"] | None, Field(description="Where it is")
    ] = None
    destination: Annotated[Where | None, Field(description="Copy it there, with the executors it needs")] = None
    file: Annotated[Name | None, Field(description="One file of a tool with several")] = None
    offset: Annotated[int, Field(ge=0, description="Where to go on in an output")] = 0
    length: Annotated[int, Field(ge=1, le=1_000_000)] = 64_000


class ExecuteRequest(ProjectRequest):
    """Run an item, or change it."""

    action: Action = "run"
    item_id: Annotated[Name | None, Field(description="The item")] = None
    parameters: Annotated[dict[str, object], Field(description="The tool's, or the action's")] = {}
    dry_run: Annotated[bool, Field(description="Only show the plan")] = False
    frozen: Annotated[bool, Field(description="Refuse changes since signing")] = False
    checkpoint: Annotated[bool, Field(description="Save files first, for undo")] = False


class HelpRequest(Request):
    """Read how Kiwi is used."""

    topic: Annotated[Name | None, Field(description="tool, search, load, execute, create, runtimes, api, errors …")] = (
        None
    )
    project_path: Text | None = None


class InitRequest(Request):
    """Give a project its `.ai` folder."""

    project_path: Text | None = None


class DoctorRequest(Request):
    """Look at the health of this installation."""

    project_path: Text | None = None


class RegistryRequest(Request):
    """Exchange versions with another registry, or say where one is."""

    action: Annotated[
        Literal["show", "push", "pull", "add"], Field(description="push and pull copy all that the other lacks")
    ] = "show"
    remote: Annotated[
        Text | None, Field(description="A remote's name, a folder, or an address: sqlite, postgresql, http, https")
    ] = None
    url: Annotated[Text | None, Field(description="add: where the remote is")] = None
    token: Annotated[Name | None, Field(description="add: the variable that holds its token, as ${NAME}")] = None
    only: Annotated[Name | None, Field(description="push, pull: only this namespace")] = None
    with_private: Annotated[bool, Field(description="push, pull: private items too")] = False
    accept_unsigned: Annotated[bool, Field(description="pull: also what is not signed; the owner's word")] = False
    trust_key: Annotated[
        Name | None, Field(description="pull: the fingerprint of a publisher's key to trust; the owner's word")
    ] = None
    dry_run: Annotated[bool, Field(description="Show what would be copied")] = False
    project_path: Text | None = None


class McpRequest(Request):
    """Add MCP servers, look at what they offer, and say what of it may be used."""

    action: Literal[
        "list", "add", "import", "refresh", "accept", "allow", "diff", "remove", "connect", "login", "logout"
    ] = "list"
    server: Annotated[Name | None, Field(description="Which server; add: what to call it")] = None
    tool: Annotated[Name | None, Field(description="accept, diff: only this item of the server")] = None
    command: Annotated[Text | None, Field(description="add: the program that is the server")] = None
    args: Annotated[list[Text], Field(max_length=1_000, description="add: its words")] = []
    env: Annotated[dict[Name, Text], Field(description="add: its variables; secrets as ${NAME}")] = {}
    url: Annotated[Text | None, Field(description="add: the server's address")] = None
    headers: Annotated[dict[Name, Text], Field(description="add: what every request carries")] = {}
    transport: Annotated[
        Literal["http", "sse", "websocket"] | None, Field(description="add: how the address is spoken to")
    ] = None
    read: Annotated[list[Text], Field(max_length=100, description="add, allow: paths that it may read")] = []
    write: Annotated[list[Text], Field(max_length=100, description="add, allow: paths that it may change")] = []
    hosts: Annotated[list[Name], Field(max_length=100, description="add, allow: hosts that it may reach")] = []
    manifest: Annotated[dict[str, object] | None, Field(description="add: the whole manifest instead")] = None
    paths: Annotated[list[Text], Field(max_length=100, description="import: configurations to read")] = []
    all: Annotated[bool, Field(description="import: from every client that is found")] = False
    with_secrets: Annotated[
        bool, Field(description="add, import: write the secrets among the words into the user's .env")
    ] = False
    accept: Annotated[bool, Field(description="add, import: accept what the server offers first")] = True
    start: Annotated[bool, Field(description="add, import: ask the server what it offers")] = True
    yes: Annotated[bool, Field(description="refresh: start a server that was never accepted")] = False
    scopes: Annotated[
        list[Name], Field(max_length=100, description="login: rights to ask for, in place of those the server wants")
    ] = []
    client: Annotated[Name | None, Field(description="connect: the client that is to use Kiwi")] = None
    undo: Annotated[bool, Field(description="connect: take Kiwi out again")] = False
    replace: Annotated[bool, Field(description="connect: take out the servers there that are in Kiwi")] = False
    location: Annotated[Where | None, Field(description="add, import: where manifests go; connect: whose file")] = None
    dry_run: Annotated[bool, Field(description="Show what would happen")] = False
    project_path: Text | None = None


class PreferRequest(Request):
    """Look at what a client sees without searching, or change it."""

    action: Annotated[
        Literal["list", "add", "remove", "suggest"], Field(description="suggest: what to change, from how it was used")
    ] = "list"
    name: Annotated[
        Name | None, Field(description="add, remove: a name, namespace/name, server/name, a full name, or a pattern")
    ] = None
    kind: Annotated[Literal["tool", "prompt", "resource"], Field(description="As what it is seen")] = "tool"
    called: Annotated[Name | None, Field(alias="as", description="add: the name that clients call it by")] = None
    project_path: Text | None = None


class SecretsRequest(Request):
    """Look at the names of the store of secrets, or change what is in it."""

    action: Literal["list", "set", "grant", "revoke", "rotate", "remove", "seal"] = "list"
    name: Annotated[Name | None, Field(description="Which secret, by the name of its variable")] = None
    value: Annotated[SecretStr | None, Field(description="set, rotate: its value; set without one keeps it")] = None
    hosts: Annotated[
        list[Name] | None, Field(max_length=50, description="set: hosts that requests may carry it to; * for any")
    ] = None
    form: Annotated[
        Literal["header", "env", "any"] | None,
        Field(description="set: header of requests, env of processes, or any; header where hosts are given"),
    ] = None
    weak: Annotated[bool, Field(description="set, rotate: keep a value that cannot be hidden")] = False
    tool: Annotated[Name | None, Field(description="grant, revoke: an item, or a pattern of full names")] = None
    key: Annotated[
        Literal["file", "passphrase", "keyring"] | None, Field(description="seal: where the key of the store is kept")
    ] = None
    project_path: Text | None = None


class KeyRequest(Request):
    """Look at the keys that vouch for items, or change whose keys count."""

    action: Literal["list", "show", "new", "trust", "revoke", "rotate"] = "list"
    key: Annotated[Name | None, Field(description="show, trust, revoke: a public key, or its fingerprint")] = None
    publisher: Annotated[
        Name | None, Field(description="trust, revoke: a namespace, or public/NAME for one item that anybody publishes")
    ] = None
    name: Annotated[Name | None, Field(description="new, rotate: what to call the key")] = None
    rotation: Annotated[Text | None, Field(description="trust: the statement by which a known key hands over")] = None
    expires: Annotated[Name | None, Field(description="new, rotate, trust: until when, ISO 8601, or 90d")] = None
    reason: Annotated[Name | None, Field(description="revoke: why")] = None


class MigrateRequest(Request):
    """Bring an old folder of tools along."""

    path: Annotated[
        Text | None, Field(description="A project, an `.ai` folder, a folder of tools; the project itself otherwise")
    ] = None
    apply: Annotated[bool, Field(description="Do it; otherwise only the plan is shown")] = False
    location: Annotated[
        Where | None, Field(description="Where the items go; the space the folder lies in, else the project")
    ] = None
    rewrite: Annotated[bool, Field(description="Write a tool.yaml beside the code of each old Python tool")] = False
    sign: Annotated[bool, Field(description="Sign what is sound, once it is in place")] = False
    project_path: Text | None = None


class TasksRequest(Request):
    """Look at the calls that went on as tasks, and stop one."""

    action: Literal["list", "show", "cancel"] = "list"
    task_id: Annotated[Name | None, Field(description="show, cancel: which task, or the beginning of its id")] = None
    limit: Annotated[int, Field(ge=1, le=1_000)] = 20


class ApprovalsRequest(Request):
    """Look at what waits for the owner, answer it, and keep the rules by which nobody has to be asked."""

    action: Literal["list", "show", "approve", "deny", "rules", "add_rule", "remove_rule"] = "list"
    approval_id: Annotated[
        Name | None, Field(description="show, approve, deny: which question, or the beginning of its id")
    ] = None
    status: Annotated[ApprovalStatus | Literal["all"], Field(description="list: how they stand")] = "pending"
    always: Annotated[
        Literal["none", "this tool"], Field(description="approve: and from now on, for the tool as it is")
    ] = "none"
    reason: Annotated[Text | None, Field(description="deny: what the model is told")] = None
    rule_id: Annotated[Name | None, Field(description="remove_rule: which rule, or the beginning of its id")] = None
    item: Annotated[Name | None, Field(description="add_rule: an item, or a pattern of full names")] = None
    actor: Annotated[Text | None, Field(description="add_rule: only calls of this actor")] = None
    paths: Annotated[list[Text], Field(max_length=50, description="add_rule: real paths, as patterns")] = []
    hosts: Annotated[list[Name], Field(max_length=50, description="add_rule: hosts")] = []
    argv: Annotated[list[Text], Field(max_length=50, description="add_rule: the command's first words, exactly")] = []
    days: Annotated[int | None, Field(ge=1, le=3_650, description="add_rule: for how long")] = None
    limit: Annotated[int, Field(ge=1, le=1_000)] = 20


class UndoRequest(Request):
    """Look at the runs that can be undone, or undo one."""

    action: Literal["list", "apply"] = "list"
    run_id: Annotated[Name | None, Field(description="apply: which run, or the beginning of its id")] = None
    dry_run: Annotated[bool, Field(description="apply: show what would be put back")] = False
    force: Annotated[bool, Field(description="apply: also what somebody else changed since")] = False
    limit: Annotated[int, Field(ge=1, le=200)] = 20
    project_path: Text | None = None


class RelaxRequest(Request):
    """Look at what runs less strictly than its origin says, or change that."""

    action: Literal["list", "apply", "undo"] = "list"
    item_id: Annotated[Name | None, Field(description="apply, undo: the item")] = None
    to: Annotated[Literal["trusted", "standard", "sandboxed"], Field(description="apply: the level it runs under")] = (
        "standard"
    )
    reason: Annotated[Name, Field(description="apply: why, for the record")] = ""
    project_path: Text | None = None


class MemoryRequest(Request):
    """Look at the requests that searches are remembered by, or forget them."""

    action: Literal["list", "forget"] = "list"
    item: Annotated[Name | None, Field(description="Only requests after which this item was used")] = None
    limit: Annotated[int, Field(ge=1, le=2_000)] = 50


class RunsRequest(Request):
    """Look at the runs that calls left."""

    action: Literal["list", "show", "prune"] = "list"
    run_id: Annotated[Name | None, Field(description="show: which run")] = None
    tool: Annotated[Name | None, Field(description="Only runs of this tool, by its short name")] = None
    status: RunStatus | None = None
    since: Annotated[Name | None, Field(description="ISO 8601, or how long ago: 30m, 2h, 3d")] = None
    until: Annotated[Name | None, Field(description="As `since`")] = None
    limit: Annotated[int, Field(ge=1, le=1_000)] = 20
    before: Annotated[Name | None, Field(description="The `next` of the page before")] = None
    project_path: Annotated[Text | None, Field(description="Only runs in this project")] = None
    actor: Annotated[Text | None, Field(description="Runs of somebody who uses the gateway, for the owner")] = None


class AuditRequest(Request):
    """Look at the receipts of all calls, and check that none was changed."""

    action: Literal["list", "show", "verify", "export"] = "list"
    receipt: Annotated[Name | None, Field(description="show: its number, its id, or the beginning of that")] = None
    tool: Annotated[Name | None, Field(description="Only receipts about this, by its short name")] = None
    actor: Annotated[Name | None, Field(description="Only what this one did")] = None
    did: Annotated[Name | None, Field(description="Only this action: run, create, mcp add …")] = None
    status: RunStatus | None = None
    since: Annotated[Name | None, Field(description="ISO 8601, or how long ago: 30m, 2h, 3d")] = None
    until: Annotated[Name | None, Field(description="As `since`")] = None
    limit: Annotated[int, Field(ge=1, le=1_000)] = 20
    before: Annotated[int | None, Field(ge=1, le=2**62, description="list: the `next` of the page before")] = None
    after: Annotated[int, Field(ge=0, le=2**62, description="export: the `next` of the page before")] = 0
