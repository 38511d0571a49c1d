"""The secrets verb: names that the store holds, shown without values, and changed by the owner alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import InvalidRequest, NotFound, PolicyDenied
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.delivery import holder_of, vault_folder
from kiwi_mcp.kernel.requests import SecretsRequest
from kiwi_mcp.primitives.addresses import is_address
from kiwi_mcp.primitives.bounds import ANY_HOST, GrantedTo, Stored
from kiwi_mcp.primitives.sealing import SEALS, sealed_by
from kiwi_mcp.primitives.secrets import Bound, Secret, Variables
from kiwi_mcp.primitives.strength import weakness
from kiwi_mcp.primitives.vault import Vault
from kiwi_mcp.primitives.vault_key import move_key, vault_key

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*(:\d{1,5})?", re.ASCII)
_V6_PORT = re.compile(r"\[([0-9a-f:.]+)\](:\d{1,5})?", re.ASCII)
_MAY_BE_PROJECT = frozenset("p*?[")
"""How full names and patterns begin that may mean items of a project."""
_WAYS = ", ".join(f"`{way}`" for way in SEALS)
_PATTERN = re.compile(r"[*?\[]")


async def act(request: SecretsRequest, catalog: Catalog, *, is_owner: bool) -> JsonObject:
    """Answer one request about secrets."""
    state = vault_folder(catalog.space.user).parent
    vault = Vault(vault_folder(catalog.space.user), vault_key(state))
    known = await asyncio.to_thread(vault.all)  # a passphrase takes a second to become a key
    if request.action == "list":
        return _listed(list(known.values()), state, is_owner=is_owner)
    if not is_owner:
        typed = f"kiwi secrets {request.action} {request.key or request.name or 'NAME'}"[:200]
        raise PolicyDenied("Only the owner changes secrets.", suggestion=f"Ask them to type `{typed}`.")
    if request.action == "seal":
        return await _seal(request, vault, state)
    return await Change(vault, catalog, _name(request)).make(request)


async def _seal(request: SecretsRequest, vault: Vault, state: Path) -> JsonObject:
    """Have the key of the store kept in another way."""
    if request.key is None:
        raise InvalidRequest("The request does not say where to keep the key.", suggestion=f"Send `key`: {_WAYS}.")
    before, after = sealed_by(state), request.key
    await vault.move_key(partial(move_key, state, after))
    told = f"the store is opened by the {SEALS[after]} {'as before' if before == after else 'from now on'}"
    # The key is the same: whoever copied it before can open copies of the store with it.
    is_copied = before == "file" != after
    warnings: list[Json] = ["copies of the old key file still open the store: remove them"] if is_copied else []
    return {"action": "seal", "status": "sealed", "message": told, "sealed_by": SEALS[after], "warnings": warnings}


class Change:
    """One change of one secret, by the owner."""

    def __init__(self, vault: Vault, catalog: Catalog, name: str) -> None:
        self._vault = vault
        self._catalog = catalog
        self._name = name

    async def make(self, request: SecretsRequest) -> JsonObject:
        """Do what a request says, and tell it."""
        match request.action:
            case "set":
                return await self._set(request)
            case "rotate":
                return await self._rotate(request)
            case "grant":
                return await self._grant(_tool(request))
            case "revoke":
                return await self._revoke(request.tool or "")
            case _:
                await self._vault.remove(self._name)
                return self._told("remove", "removed", f"{self._name} and its value are gone from the store")

    async def _set(self, request: SecretsRequest) -> JsonObject:
        before = self._vault.all().get(self._name)
        bound = _bound(request, before)
        if request.value is None:
            stored = await self._vault.rebind(self._name, bound)
            return self._told("set", "bound", f"{self._name} is {_reach(stored)}; its value stays", stored)
        secret, is_weak = self._value(request)
        stored = await self._vault.put(self._name, secret, bound, is_weak=is_weak)
        return self._told("set", "set", f"{self._name} is in the store, {_reach(stored)}", stored)

    async def _rotate(self, request: SecretsRequest) -> JsonObject:
        self._vault.named(self._name)
        secret, is_weak = self._value(request)
        stored = await self._vault.put(self._name, secret, None, is_weak=is_weak)
        message = f"{self._name} has another value from now on; hosts, form and grants stay"
        return self._told("rotate", "rotated", message, stored)

    async def _grant(self, word: str) -> JsonObject:
        space = self._catalog.space
        holder = None if _PATTERN.search(word) else holder_of(self._catalog.resolve(word), space)
        item, digest = (holder.item, holder.digest) if holder else (word, "")
        is_of_project = item[0] in _MAY_BE_PROJECT
        granted = GrantedTo(item, str(space.project) if is_of_project else "", digest)
        stored = await self._vault.grant(self._name, granted)
        where = f" in {space.project}" if is_of_project else ""
        return self._told("grant", "granted", f"{item}{where} is given {self._name} from now on", stored)

    async def _revoke(self, word: str) -> JsonObject:
        named = word.partition("@")[0]
        before = self._vault.named(self._name).grants
        gone = [one for one in before if not word or named in {one.item, one.item.rpartition("/")[2]}]
        if word and not gone:
            granted = ", ".join(f"`{one.item}`" for one in before) or "nothing"
            raise NotFound(
                f"{self._name} is not granted to {word!r} by that name.",
                suggestion=f"It is granted to {granted}; name one of these.",
            )
        stored = await self._vault.revoke(self._name, gone.__contains__)
        lost = ", ".join(one.item for one in gone) or "nothing"
        return self._told("revoke", "revoked", f"{self._name} was taken back from {lost}", stored, _left(stored, gone))

    def _value(self, request: SecretsRequest) -> tuple[Secret, bool]:
        """Return the value that was sent, and whether it is one that cannot be taken out of what tools say."""
        secret = Secret(request.value.get_secret_value() if request.value else "")
        fault = weakness(self._name, secret)
        if fault and (fault.is_unusable or not request.weak):
            raise InvalidRequest(f"The value of {self._name} {fault.reason}.", suggestion=fault.fix)
        return secret, fault is not None

    def _told(
        self, action: str, status: str, message: str, stored: Stored | None = None, warnings: Sequence[str] = ()
    ) -> JsonObject:
        told: dict[str, Json] = {"action": action, "status": status, "message": message, "name": self._name}
        if stored is None:
            return told
        told |= {"secret": _row(stored), "warnings": [*warnings, *_doubts(stored), *self._elsewhere()]}
        if action == "set" and not stored.grants:
            told["next"] = f"kiwi secrets grant {self._name} TOOL"
        return told

    def _elsewhere(self) -> Sequence[str]:
        space = self._catalog.space
        place = Variables().locate([self._name], project=space.project, user=space.user)[self._name]
        return [f"{self._name} is also set in {place}, which no longer counts; remove it there"] if place else []


def _name(request: SecretsRequest) -> str:
    name = request.name or ""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            "The request names no secret." if not name else f"{name[:200]!r} cannot be the name of a variable.",
            suggestion="Send `name`: letters, digits and `_`, such as CRM_KEY.",
        )
    return name


def _tool(request: SecretsRequest) -> str:
    if not request.tool:
        raise InvalidRequest("The request names no item.", suggestion="Send `tool`: an item, or a pattern of names.")
    return request.tool


def _bound(request: SecretsRequest, before: Stored | None) -> Bound:
    """Return what is to hold a secret: what was said, else what held it before, else no more than it must have."""
    said = None if request.hosts is None else tuple(dict.fromkeys(host.strip().lower() for host in request.hosts))
    if issues := [issue for host in said or () for issue in _host_issues(host)]:
        told = "; ".join(f"{issue.place} {issue.reason}" for issue in issues)
        raise InvalidRequest(f"{told}.", suggestion=issues[0].fix, issues=[issue.to_json() for issue in issues])
    hosts = said if said is not None else before.bound.hosts if before else ()
    return Bound(hosts, request.form or (before.bound.form if before else "header" if hosts else "env"))


def _host_issues(host: str) -> Sequence[Issue]:
    v6 = _V6_PORT.fullmatch(host)
    if host == ANY_HOST or _HOST.fullmatch(host) or is_address(v6[1] if v6 else host):
        return ()
    return [Issue(host[:200], "is not a host", "Write `api.example.com`, `*.example.com` or `127.0.0.1:8080`.")]


def _reach(stored: Stored) -> str:
    """Return in words where a secret may go."""
    hosts, form = stored.bound.hosts, stored.bound.form
    if form == "env":
        return "for processes"
    told = "any host" if ANY_HOST in hosts else ", ".join(hosts) or "no host yet"
    return f"for headers of requests to {told}" if form == "header" else f"for processes, and for requests to {told}"


def _doubts(stored: Stored) -> Sequence[str]:
    """Return what the owner should know of a secret as it is now."""
    hosts, form = stored.bound.hosts, stored.bound.form
    doubts = []
    if stored.is_weak:
        doubts.append("its value is too short or too common to be taken out of what tools say")
    if form == "env" and hosts:
        doubts.append("hosts hold requests, and it is for processes alone: `--form any` or `--form header` says more")
    if form == "header" and not hosts:
        doubts.append("no request may carry it yet: `--hosts` says where it may go")
    return doubts


def _left(stored: Stored, gone: Sequence[GrantedTo]) -> Sequence[str]:
    """Return which patterns still give a secret to what it was taken from."""
    covering = {one.item for one in stored.grants for lost in gone if fnmatchcase(lost.item, one.item)}
    return [f"`{pattern}` still gives it" for pattern in sorted(covering)]


def _listed(known: Sequence[Stored], state: Path, *, is_owner: bool) -> JsonObject:
    """Return all secrets; to whoever is not the owner their names, so that they can be asked for."""
    if not is_owner:
        return {"action": "list", "secrets": [{"name": one.name} for one in known]}
    return {"action": "list", "secrets": [_row(one) for one in known], "sealed_by": SEALS[sealed_by(state)]}


def _row(stored: Stored) -> JsonObject:
    return {
        "name": stored.name,
        "hosts": list(stored.bound.hosts),
        "form": stored.bound.form,
        "grants": [{"item": one.item, "project": one.project} for one in stored.grants],
        "set_at": stored.set_at,
        "valued_at": stored.valued_at,
        "age_days": max(0, (datetime.now(UTC) - datetime.fromisoformat(stored.valued_at)).days),
        "weak": stored.is_weak,
    }
