"""Rules for hosts and addresses, checked name lookups, and hosts of the local network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from kiwi_mcp.domain.errors import AddressDenied, RequestFailed
from kiwi_mcp.domain.grants import address_of, fits_host
from kiwi_mcp.domain.patterns import lazy_pattern

PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
"""The default port of each scheme."""
# Not link-local: a service there may give away the machine's own credentials.
_NETWORKS = tuple(map(IPv4Network, ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))) + tuple(
    map(IPv6Network, ("::1/128", "fc00::/7"))
)
_LABEL = lazy_pattern(r"[a-z][a-z0-9-]*")
_ENDINGS = (".localhost", ".local", ".lan", ".internal", ".home.arpa")
"""The endings of names that only the local network assigns, so that an outside party cannot decide their address."""
_V4 = {
    IPv4Network(range_): name
    for range_, name in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by carriers"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved for protocols"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
    )
}
_V6 = {
    IPv6Network(range_): name
    for range_, name in (
        ("::1/128", "loopback"),
        ("::/128", "unspecified"),
        ("::/96", "IPv4-compatible"),
        ("64:ff9b:1::/48", "local-use translation"),
        ("100::/64", "discard-only"),
        ("2001::/23", "reserved for protocols"),
        ("2001:db8::/32", "documentation"),
        ("3fff::/20", "documentation"),
        ("5f00::/16", "segment routing"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
}
_UNICAST = IPv6Network("2000::/3")
"""The only IPv6 space from which public addresses are given out."""
_MAPPED, _NAT64, _SIX_TO_FOUR = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"), IPv6Network("2002::/16")
_NUMBER = lazy_pattern(r"(?:[0-9]+|0[xX][0-9a-fA-F]*)\Z")
_NAME = lazy_pattern(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\Z")
"""A host name in lower case and in ASCII, which is how names in other scripts are written on the wire."""
WEB = (80, 443)
"""The ports that a host is reached at where the rule that names it says none."""
Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""A name and a port to addresses, the preferred one first."""


def local_network_host(url: str) -> str:
    """Return the host and port of an address in the local network, as `host:port`; empty for every other address.

    A public DNS name does not count: its owner may point it to another address at any time.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        return ""
    if not port or "$" in parts.netloc or "{" in parts.netloc:
        return ""
    if (address := address_of(host)) is None:
        # A number in an odd spelling is no name, and begins with a digit.
        is_nearby = host.endswith(_ENDINGS) or _LABEL.fullmatch(host) is not None
    else:
        is_nearby = any(address.version == network.version and address in network for network in _NETWORKS)
    return host_port(host, port) if is_nearby else ""


def host_port(host: str, port: int) -> str:
    """Return a host and a port as one text, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HostRules(Struct, frozen=True):
    """The hosts that may be reached. A rule that denies wins over all others."""

    hosts: tuple[str, ...] | None = None
    """The hosts that may be reached, at ports 80 and 443 unless a port is given; None for every public host."""
    denied: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()
    """Those that may have addresses which are not public."""

    def refusal(self, host: str, port: int) -> str | None:
        """Return why a host is refused before it is looked up, or None where it is not."""
        if (reason := refusal_of_host(host, port=port, granted=self.granted)) is not None:
            return reason
        if is_denied(host, port, self.denied):
            return "the owner's policy denies it"
        if self.hosts is not None and not is_listed(host, port, self.hosts):
            known = is_granted(host, None, self.hosts)
            return f"it may be reached, but not at port {port}" if known else "it is not among the hosts to be reached"
        return None


def refusal(address: str, *, host: str, port: int, granted: Sequence[str]) -> str | None:
    """Return why a request for `host` may not go to `address`, or None where it may.

    A grant is about the host as the request writes it: a name that merely resolves to a granted address is not granted.
    """
    if (reason := refusal_of_host(host, port=port, granted=granted)) is not None:
        return reason
    if is_granted(host, port, granted):
        return None
    parsed = address_of(address)
    if parsed is None:
        return f"{address!r} is not an address"
    kind = _not_public(parsed)
    return None if kind is None else f"{address} is not a public address ({kind})"


def refusal_of_host(host: str, *, port: int, granted: Sequence[str]) -> str | None:
    """Return why a host is refused before it is looked up, or None: it is no name, or an address in an odd spelling."""
    name = plain_host(host)
    if not _NAME.match(name) and address_of(name) is None:
        return f"{host!r} is not a host name"
    if address_of(name) is None and _NUMBER.match(name.rpartition(".")[2]) and not is_granted(host, port, granted):
        return f"{host!r} is an address in an unusual spelling"
    return None


def is_address(host: str) -> bool:
    """Whether a host is an address as it stands, with no name to look up."""
    return address_of(plain_host(host)) is not None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def is_granted(host: str, port: int | None, granted: Sequence[str]) -> bool:
    """Whether one of the owner's patterns names this host: `host`, `host:port`, `*.host`, `*:port`, an address.

    A pattern without a port is about every port; without `port`, so is every pattern.
    """
    name = plain_host(host)
    return any(_matches(pattern, name, port) for pattern in granted)


def is_listed(host: str, port: int, hosts: Sequence[str]) -> bool:
    """Whether one of the patterns names this host for this port; one that says no port is about those of the web.

    `*` stands for every host, which still is reached at public addresses only.
    """
    if port in WEB and "*" in hosts:
        return True
    return is_granted(host, port, [one for one in hosts if port in WEB or _split(one)[1] is not None])


def is_denied(host: str, port: int, denied: Sequence[str]) -> bool:
    """Whether one of the patterns names this host, in one of the ways in which the owner's rules do."""
    name = plain_host(host)
    return is_granted(host, port, denied) or any(fits_host(rule, host_port(name, port)) for rule in denied)


def plain_host(host: str) -> str:
    """Return a host as it is compared and recorded: in lower case, without brackets and without the root's dot."""
    name = host.lower()
    if name.startswith("[") and name.endswith("]"):
        return name[1:-1]
    return name.removesuffix(".")


def _matches(pattern: str, name: str, port: int | None) -> bool:
    wanted, wanted_port = _split(pattern)
    if wanted_port is not None and port is not None and wanted_port != str(port):
        return False
    if wanted == "*" and wanted_port is not None:  # `*` matches only together with a port
        return True
    if wanted.startswith("*."):
        return name.endswith(wanted[1:]) and len(name) > len(wanted) - 1 and address_of(name) is None
    address = address_of(wanted)
    return address == address_of(name) if address is not None else bool(wanted) and wanted == name


def _split(pattern: str) -> tuple[str, str | None]:
    if pattern.startswith("["):
        host, _, rest = pattern[1:].partition("]")
        return plain_host(host), rest[1:] if rest.startswith(":") else None
    if pattern.count(":") == 1:
        host, _, port = pattern.partition(":")
        return plain_host(host), port
    return plain_host(pattern), None


def _not_public(address: IPv4Address | IPv6Address) -> str | None:
    if isinstance(address, IPv4Address):
        return next((name for network, name in _V4.items() if address in network), None)
    bare = IPv6Address(int(address))  # without a scope such as %eth0
    if bare in _MAPPED or bare in _NAT64 or bare in _SIX_TO_FOUR:  # packets are handed on to the IPv4 address inside
        inner = IPv4Address(int(bare) >> (80 if bare in _SIX_TO_FOUR else 0) & 0xFFFFFFFF)
        kind = _not_public(inner)
        return kind and f"{kind}, {inner} inside"
    kind = next((name for network, name in _V6.items() if bare in network), None)
    return kind or (None if bare in _UNICAST else "reserved")


async def look_up(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name, as the system knows them."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


class Lookup:
    """The way to hosts: their addresses, and plain sockets for protocols of their own."""

    def __init__(self, resolver: Resolver = look_up) -> None:
        self._resolver = resolver

    async def addresses(self, host: str, port: int, granted: Sequence[str]) -> Sequence[str]:
        """Return the addresses of a host; one that is refused among them refuses the host."""
        if (reason := refusal_of_host(host, port=port, granted=granted)) is not None:
            raise denied(host, port, reason)
        found: Sequence[str] = [host]
        if address_of(host) is None:
            try:
                found = await self._resolver(host, port)
            except (OSError, UnicodeError) as fault:
                raise unknown_host(host) from fault
            if not found:
                raise unknown_host(host)
        for address in found:
            if (reason := refusal(address, host=host, port=port, granted=granted)) is not None:
                raise denied(host, port, reason)
        return found

    async def connect_to(self, addresses: Sequence[str], port: int) -> socket.socket:
        """Return a socket that is connected to the first of some addresses that answers."""
        fault: OSError | None = None
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            opened = socket.socket(family, socket.SOCK_STREAM)
            opened.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(opened, (address, port))
            except OSError as refused:
                opened.close()
                fault = refused
            except BaseException:
                opened.close()
                raise
            else:
                return opened
        raise fault or OSError("no address")


def denied(host: str, port: int, reason: str) -> AddressDenied:
    """Return the refusal of a host, with the words that would grant it."""
    shown = host_port(host, port)
    return AddressDenied(
        f"A request to {shown} is not permitted: {reason}.",
        suggestion=f"If the owner means it, add `{shown}` to `hosts.allow` in ~/.ai/policy.yaml.",
        host=host,
        port=port,
        reason=reason,
    )


def unknown_host(host: str) -> RequestFailed:
    """Return the failure to find a host's address."""
    return RequestFailed(
        f"The host {host!r} has no address.",
        suggestion="Check the spelling of the host, and that this machine can look up names.",
        cause="dns",
        host=host,
    )
