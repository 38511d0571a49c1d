"""The items, hosts and forms that a stored secret is granted to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from kiwi_mcp.domain.errors import SecretNotGranted
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.http.addresses import PORTS, is_granted
from kiwi_mcp.primitives.secrets.reveal import SecretScope, names_in

ANY_HOST = "*"
Bounds: TypeAlias = Mapping[str, SecretScope]


class SecretRecipient(Struct, frozen=True):
    """The recipient of a secret: an item without its version, and the project that it is used in."""

    item: str
    project: str
    is_process: bool = False
    """Whether it is given secrets as variables of a process, not in requests."""
    digest: str = ""
    """What it is now, byte by byte."""
    is_vouched_for: bool = False
    """Whether its content is known to be its owner's own, or that of a publisher they trust."""
    untrusted: tuple[str, ...] | None = None
    """The items of its chain that neither the owner nor a trusted publisher signed; None where that is not known."""
    how_to_trust: str = ""
    """What the owner does to change that."""

    @property
    def name(self) -> str:
        """The short name of the item."""
        return self.item.rpartition("/")[2]


class SecretGrant(Struct, frozen=True):
    """The items that are given a secret: a full name without version, or a pattern of such names.

    Items of projects have the same names everywhere, so those are given it in one project alone.
    """

    item: str
    project: str
    digest: str = ""
    """The digest of the item when it was granted; empty for a pattern, which covers any content."""

    def covers(self, holder: SecretRecipient) -> bool:
        """Whether an item is among them."""
        is_here = not holder.item.startswith("project/") or holder.project == self.project
        return is_here and fnmatchcase(holder.item, self.item)


class StoredSecret(Struct, frozen=True):
    """A secret of the store, without its value."""

    name: str
    version: int
    """Another one for each value; no two values of a store share it."""
    bound: SecretScope
    grants: tuple[SecretGrant, ...] = ()
    set_at: str = ""
    """When the name was first set, and below, when it was given its present value: ISO 8601 in UTC."""
    valued_at: str = ""
    is_weak: bool = False
    """Whether its value is too short or too common to be taken out of what tools say."""

    def is_granted(self, holder: SecretRecipient) -> bool:
        """Whether an item was granted it, and is unchanged since, or changed by the owner or a trusted publisher."""
        return any(
            grant.covers(holder) and (not grant.digest or grant.digest == holder.digest or holder.is_vouched_for)
            for grant in self.grants
        )


def refuse_holder(stored: StoredSecret, holder: SecretRecipient) -> None:
    """Refuse an item that was not granted a secret, and a process that would have one that is for requests."""
    if not stored.is_granted(holder):
        is_changed = any(grant.covers(holder) for grant in stored.grants)
        reason = "it has changed since the owner granted it" if is_changed else "the owner has not granted it"
        raise SecretNotGranted(
            f"`{holder.name}` asks for ${{{stored.name}}}, and {reason} that secret.",
            suggestion=f"If it is to have it, the owner types `kiwi secrets grant {stored.name} {holder.item}`.",
            secret=stored.name,
            tool_id=holder.name,
        )
    if holder.is_process and stored.bound.form == "header":
        raise _unfit(stored.name, f"`{holder.name}` is a process, and ${{{stored.name}}} is for headers of requests")


def refuse_untrusted(names: Sequence[str], holder: SecretRecipient) -> None:
    """Refuse to give variables that are not in the store to an item, unless all of its chain is trusted."""
    if not names or holder.untrusted == ():
        return
    wanted, untrusted = ", ".join(f"${{{name}}}" for name in names), holder.untrusted or (holder.item,)
    which = "it" if holder.item in untrusted else f"`{untrusted[0]}`, which it runs on,"
    hosts = "" if holder.is_process else " --hosts HOST"
    grants = "; ".join(
        f"`kiwi secrets set {name}{hosts}`, then `kiwi secrets grant {name} {holder.item}`" for name in names
    )
    raise SecretNotGranted(
        f"`{holder.name}` asks for {wanted}, and {which} is not signed by the owner or a trusted publisher. "
        "Nothing was done.",
        suggestion=f"{holder.how_to_trust} Or the owner grants it the value: {grants}.".strip(),
        secret=names[0],
        tool_id=holder.name,
    )


def refuse_request(spec: HttpSpec, bounds: Bounds, *, host: str, port: int) -> None:
    """Refuse a request that would carry a secret to a host, or in a form, that it is not for."""
    held = _names([dict(spec.headers), list(spec.basic or ())])
    loose = _names([spec.url, spec.body])
    for name in (name for name in bounds if name in held | loose):
        form, hosts = bounds[name].form, bounds[name].hosts
        if form == "env":
            raise _unfit(name, f"${{{name}}} is for the environment of processes, and this is a request")
        if form == "header" and name in loose:
            raise _unfit(name, f"${{{name}}} is for headers, and stands in the address or the body of this request")
        if ANY_HOST not in hosts and not is_granted(host, port, hosts):
            known = ", ".join(hosts) or "no host"
            raise SecretNotGranted(
                f"The request goes to {host}:{port}, and ${{{name}}} is for {known}. Nothing was sent.",
                suggestion=f"If it is to go there, the owner types `kiwi secrets set {name} --keep --hosts …`.",
                secret=name,
                host=host,
            )


def refuse_target(spec: HttpSpec, bounds: Bounds) -> None:
    """Refuse such a request where its host can be seen; one that a variable names is known when the request is made."""
    if not bounds:
        return
    try:
        target = urlsplit(spec.url)
        host = "" if names_in(target.netloc) else target.hostname or ""
        port = (host and target.port) or PORTS.get(target.scheme, 0)
    except ValueError:
        return  # no address at all, which is refused when the request is made
    if host:
        refuse_request(spec, bounds, host=host, port=port)


def _unfit(name: str, reason: str) -> SecretNotGranted:
    typed = f"kiwi secrets set {name} --keep --form any"
    return SecretNotGranted(f"{reason}.", suggestion=f"If it is to go there, the owner types `{typed}`.", secret=name)


def _names(value: Json) -> frozenset[str]:
    return frozenset(name for text in _texts(value) for name in names_in(text))


def _texts(value: Json) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for name, inner in value.items():
                yield name
                yield from _texts(inner)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner)
