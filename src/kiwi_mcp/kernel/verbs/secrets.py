"""secrets: list, set, rotate, grant, revoke, remove, seal."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.signer import KEYS_FOLDER
from kiwi_mcp.kernel.verb import ANYONE, OWNER, Argument, NameText, Option, ProjectRequest, Response, filled, verb
from kiwi_mcp.kernel.view import Hint, Notice, TableRow, ViewItem
from kiwi_mcp.manifest.trust import FILE_NAME as TRUST_FILE
from kiwi_mcp.manifest.trust import owner_trust
from kiwi_mcp.policy.secret_access import holder_of, open_vault, vault_folder
from kiwi_mcp.primitives.http.addresses import is_address
from kiwi_mcp.primitives.secrets.encrypted_records import KeyPairs
from kiwi_mcp.primitives.secrets.grants import ANY_HOST, SecretGrant, StoredSecret
from kiwi_mcp.primitives.secrets.key_storage import SEALS, is_behind_passphrase, move_key, sealed_by
from kiwi_mcp.primitives.secrets.redaction import weakness
from kiwi_mcp.primitives.secrets.reveal import SecretScope, Variables
from kiwi_mcp.primitives.secrets.store import SecretStore

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*(:\d{1,5})?", re.ASCII)
_V6_PORT = re.compile(r"\[([0-9a-f:.]+)\](:\d{1,5})?", re.ASCII)
_MAY_BE_PROJECT = frozenset("p*?[")
"""How full names and patterns begin that may mean items of a project."""
_PATTERN = re.compile(r"[*?\[]")

IsWeak = Annotated[bool, Option("Store a value that is too short or common to be hidden in output.")]


class GrantLine(Response, frozen=True, kw_only=True):
    """The items that may use a secret; `project` is empty if they may do so everywhere."""

    item: str
    project: str


class SecretLine(Response, frozen=True, kw_only=True):
    """One secret as lists show it; callers other than the owner see the name alone."""

    name: str
    hosts: list[str] | UnsetType = UNSET
    form: str | UnsetType = UNSET
    grants: list[GrantLine] | UnsetType = UNSET
    set_at: str | UnsetType = UNSET
    valued_at: str | UnsetType = UNSET
    age_days: int | UnsetType = UNSET
    weak: bool | UnsetType = UNSET


class SecretsListResponse(Response, frozen=True, kw_only=True):
    """All secrets, without values."""

    action: str = "list"
    secrets: list[SecretLine]
    sealed_by: str | UnsetType = UNSET


def _list_view(response: SecretsListResponse) -> Iterator[ViewItem]:
    width = max((len(one.name) for one in response.secrets), default=0)
    for one in response.secrets:
        hosts = ",".join(one.hosts or ()) or "-"
        weak = "  weak" if one.weak else ""
        yield TableRow(f"{one.name.ljust(width)}  {one.form or '':<6}  {hosts}  {one.age_days or 0} days{weak}")
        for grant in one.grants or ():
            yield TableRow(f"  → {grant.item}{f' in {grant.project}' if grant.project else ''}")
    if response.secrets:
        yield Notice(f"Sealed with a {response.sealed_by or ''}.")
    else:
        yield Notice("The store holds no secrets.")
        yield Hint("kiwi secrets set NAME --hosts api.example.com")


@verb("list", group="secrets", access=ANYONE, records=False, is_local=True, shows=_list_view)
async def list_secrets(request: ProjectRequest, context: VerbContext) -> SecretsListResponse:
    """List the secrets: names, hosts, forms, grants and ages, never values."""
    space = context.services.catalogs.space_if_any(request.project_path)
    return await asyncio.to_thread(_listed, space, is_owner=context.is_owner)


def _listed(space: Space, *, is_owner: bool) -> SecretsListResponse:
    """Return all secrets; callers other than the owner get the names, so that they can ask for them."""
    way, known = sealed_by(_state(space)), open_vault(space.user).all().values()
    if not is_owner:
        return SecretsListResponse(secrets=[SecretLine(name=one.name) for one in known])
    return SecretsListResponse(secrets=[_line(one) for one in known], sealed_by=SEALS[way])


class SecretRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which secret."""

    name: Annotated[NameText, Argument("The name of its variable, such as CRM_KEY.", "NAME")]


class SecretsSetRequest(SecretRequest, frozen=True, kw_only=True):
    """A secret to store; without a value, an existing one keeps its value."""

    value: Secret | None = None
    hosts: Annotated[
        Annotated[list[NameText], Meta(max_length=50)] | None,
        Option("Hosts that requests may carry it to, with commas; * any.", kind="commas"),
    ] = None
    form: Annotated[Literal["header", "env", "any"] | None, Option("header (with hosts), env (without), or any.")] = (
        None
    )
    weak: IsWeak = False


class SecretChangeResponse(Response, frozen=True, kw_only=True):
    """What was changed, and the secret as it is now."""

    action: str
    status: str
    message: str
    name: str
    secret: SecretLine | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    next: str | UnsetType = UNSET


@verb("set", group="secrets", access=OWNER, is_local=True)
async def set_secret(request: SecretsSetRequest, context: VerbContext) -> SecretChangeResponse:
    """Store a secret; its value is read from standard input, or asked for."""
    catalog, store = await _opened(request, context)
    name, scope = request.name, _scope(request, store.all().get(request.name))
    if request.value is None:
        stored = await store.rebind(name, scope)
        status, message = "bound", f"{name} is {_reach(stored)}; its value stays"
    else:
        is_weak = _check_value(name, request.value, is_weak_accepted=request.weak)
        stored = await store.put(name, request.value, scope, is_weak=is_weak)
        status, message = "set", f"{name} is in the store, {_reach(stored)}"
    following = UNSET if stored.grants else f"kiwi secrets grant {name} TOOL"
    return _changed("set", status, message, stored, catalog.space, next=following)


class SecretsRotateRequest(SecretRequest, frozen=True, kw_only=True):
    """Another value of a secret."""

    value: Secret
    weak: IsWeak = False


@verb("rotate", group="secrets", access=OWNER, is_local=True)
async def rotate_secret(request: SecretsRotateRequest, context: VerbContext) -> SecretChangeResponse:
    """Give a secret another value; hosts, form and grants stay."""
    catalog, store = await _opened(request, context)
    store.named(request.name)
    is_weak = _check_value(request.name, request.value, is_weak_accepted=request.weak)
    stored = await store.put(request.name, request.value, None, is_weak=is_weak)
    message = f"{request.name} has another value from now on; hosts, form and grants stay"
    return _changed("rotate", "rotated", message, stored, catalog.space)


class SecretsGrantRequest(SecretRequest, frozen=True, kw_only=True):
    """A secret, and the tool that may use it."""

    tool: Annotated[
        NameText, Meta(min_length=1), Argument("A tool, an MCP server, or a pattern such as 'user/local/*'.", "TOOL")
    ]


@verb("grant", group="secrets", access=OWNER, is_local=True, needs_receipt=True)
async def grant_secret(request: SecretsGrantRequest, context: VerbContext) -> SecretChangeResponse:
    """Let a tool use a secret that it names."""
    catalog, store = await _opened(request, context)
    space, tool = catalog.space, request.tool
    holder = None if _PATTERN.search(tool) else holder_of(catalog.resolve(tool), space)
    item, digest = (holder.item, holder.digest) if holder else (tool, "")
    is_of_project = item[0] in _MAY_BE_PROJECT
    stored = await store.grant(request.name, SecretGrant(item, str(space.project) if is_of_project else "", digest))
    where = f" in {space.project}" if is_of_project else ""
    return _changed("grant", "granted", f"{item}{where} is given {request.name} from now on", stored, space)


class SecretsRevokeRequest(SecretRequest, frozen=True, kw_only=True):
    """A secret, and the tool that may use it no longer."""

    tool: Annotated[NameText | None, Argument("From which tool or pattern; from all otherwise.", "TOOL")] = None


@verb("revoke", group="secrets", access=OWNER, is_local=True)
async def revoke_secret(request: SecretsRevokeRequest, context: VerbContext) -> SecretChangeResponse:
    """Take a secret back from a tool, or from all of them."""
    catalog, store = await _opened(request, context)
    name, tool = request.name, request.tool or ""
    wanted = tool.partition("@")[0]
    before = store.named(name).grants
    gone = [one for one in before if not tool or wanted in {one.item, one.item.rpartition("/")[2]}]
    if tool and not gone:
        granted = ", ".join(f"`{one.item}`" for one in before) or "nothing"
        raise NotFound(
            f"{name} is not granted to {tool!r} by that name.",
            suggestion=f"It is granted to {granted}; name one of these.",
        )
    stored = await store.revoke(name, gone.__contains__)
    covering = {one.item for one in stored.grants for lost in gone if fnmatchcase(lost.item, one.item)}
    remaining = [f"`{pattern}` still gives it" for pattern in sorted(covering)]
    message = f"{name} was taken back from {', '.join(one.item for one in gone) or 'nothing'}"
    return _changed("revoke", "revoked", message, stored, catalog.space, remaining)


@verb("remove", group="secrets", access=OWNER, is_local=True)
async def remove_secret(request: SecretRequest, context: VerbContext) -> SecretChangeResponse:
    """Remove a secret and its value from the store."""
    _, store = await _opened(request, context)
    await store.remove(request.name)
    message = f"{request.name} and its value are gone from the store"
    return SecretChangeResponse(action="remove", status="removed", message=message, name=request.name)


class SecretsSealRequest(ProjectRequest, frozen=True, kw_only=True):
    """Where the key of the store is kept."""

    key: Annotated[Literal["file", "keyring"], Argument("keyring or file.", "WHERE")]


class SecretsSealResponse(Response, frozen=True, kw_only=True):
    """Where the key of the store is now."""

    action: str = "seal"
    status: str = "sealed"
    message: str
    sealed_by: str
    warnings: list[str]


@verb("seal", group="secrets", access=OWNER, is_local=True)
async def seal_secrets(request: SecretsSealRequest, context: VerbContext) -> SecretsSealResponse:
    """Keep the key of the store in the keyring of the system, or in a file."""
    space = context.services.catalogs.space_if_any(request.project_path)
    state, after = _state(space), request.key
    before = None if is_behind_passphrase(state) else sealed_by(state)
    await open_vault(space.user).move_key(partial(move_key, state, after, partial(_check_key, space.user)))
    # The key is the same: an earlier copy of it can still open copies of the store.
    is_copied = before == "file" != after
    return SecretsSealResponse(
        message=f"the store is opened by the {SEALS[after]} {'as before' if before == after else 'from now on'}",
        sealed_by=SEALS[after],
        warnings=["copies of the old key file still open the store: remove them"] if is_copied else [],
    )


def _check_key(user: Path, key: bytes) -> None:
    """Refuse a key that does not open the secrets and the private keys of a user."""
    folder = vault_folder(user)
    SecretStore(folder, lambda: key).all()
    pairs = KeyPairs(folder.with_name(KEYS_FOLDER), lambda: key)
    for public in owner_trust(user / TRUST_FILE).own:
        with suppress(NotFound):
            pairs.sign(public, b"")


def _state(space: Space) -> Path:
    return vault_folder(space.user).parent


async def _opened(request: SecretRequest, context: VerbContext) -> tuple[Catalog, SecretStore]:
    """Return the catalog of a request and the store of secrets, unlocked; refuse a name that no variable can have."""
    catalog = context.services.catalogs.at(request.project_path)
    if _NAME.fullmatch(request.name) is None:
        raise InvalidRequest(
            f"{request.name[:200]!r} cannot be the name of a variable.",
            suggestion="Send `name`: letters, digits and `_`, such as CRM_KEY.",
        )
    store = open_vault(catalog.space.user)
    await asyncio.to_thread(store.all)  # a keyring may ask the owner to unlock it
    return catalog, store


def _check_value(name: str, value: Secret, *, is_weak_accepted: bool) -> bool:
    """Return whether a value cannot be removed from the output of tools; refuse one that is not accepted."""
    fault = weakness(name, value)
    if fault and (fault.is_unusable or not is_weak_accepted):
        raise InvalidRequest(f"The value of {name} {fault.reason}.", suggestion=fault.fix)
    return fault is not None


def _changed(
    action: str,
    status: str,
    message: str,
    stored: StoredSecret,
    space: Space,
    warnings: Sequence[str] = (),
    next: str | UnsetType = UNSET,  # noqa: A002 - the name of the field
) -> SecretChangeResponse:
    """Return a change of a secret, with what the owner should know of the secret as it is now."""
    name = stored.name
    hosts = stored.bound.hosts
    form = stored.bound.form
    found = list(warnings)
    if stored.is_weak:
        found.append("its value is too short or too common to be taken out of what tools say")
    if form == "env" and hosts:
        found.append("hosts hold requests, and it is for processes alone: `--form any` or `--form header` says more")
    if form == "header" and not hosts:
        found.append("no request may carry it yet: `--hosts` says where it may go")
    if place := Variables().locate([name], project=space.project, user=space.user)[name]:
        found.append(f"{name} is also set in {place}, which no longer counts; remove it there")
    return SecretChangeResponse(
        action=action, status=status, message=message, name=name, secret=_line(stored), warnings=found, next=next
    )


def _scope(request: SecretsSetRequest, before: StoredSecret | None) -> SecretScope:
    """Return the scope of a secret: the requested one, else the earlier one, else the narrowest."""
    wanted = None if request.hosts is None else tuple(dict.fromkeys(host.strip().lower() for host in request.hosts))
    issues = []
    for host in wanted or ():
        v6 = _V6_PORT.fullmatch(host)
        if not (host == ANY_HOST or _HOST.fullmatch(host) or is_address(v6[1] if v6 else host)):
            fix = "Write `api.example.com`, `*.example.com` or `127.0.0.1:8080`."
            issues.append(Issue(host[:200], "is not a host", fix))
    if issues:
        listed = "; ".join(f"{issue.place} {issue.reason}" for issue in issues)
        raise InvalidRequest(f"{listed}.", suggestion=issues[0].fix, issues=[issue.to_json() for issue in issues])
    if before:
        hosts = before.bound.hosts if wanted is None else wanted
        return SecretScope(hosts, request.form or before.bound.form)
    return SecretScope(wanted or (), request.form or ("header" if wanted else "env"))


def _reach(stored: StoredSecret) -> str:
    """Return in words where a secret may go."""
    hosts, form = stored.bound.hosts, stored.bound.form
    if form == "env":
        return "for processes"
    listed = "any host" if ANY_HOST in hosts else ", ".join(hosts) or "no host yet"
    headers = f"for headers of requests to {listed}"
    return headers if form == "header" else f"for processes, and for requests to {listed}"


def _line(stored: StoredSecret) -> SecretLine:
    return filled(
        SecretLine,
        stored,
        hosts=list(stored.bound.hosts),
        form=stored.bound.form,
        grants=[filled(GrantLine, one) for one in stored.grants],
        age_days=max(0, (datetime.now(UTC) - datetime.fromisoformat(stored.valued_at)).days),
        weak=stored.is_weak,
    )
