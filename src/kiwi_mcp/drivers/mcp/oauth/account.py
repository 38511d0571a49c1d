"""The account of a server: what is kept of its login from one call to the next, and from one process to another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256

from kiwi_mcp.domain.errors import StoreDamaged
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.drivers.mcp.oauth.client import Client, owners_client
from kiwi_mcp.drivers.mcp.oauth.discovery import Authority, Challenge
from kiwi_mcp.drivers.mcp.oauth.tokens import Desk, Tokens
from kiwi_mcp.drivers.mcp.oauth.web import Web
from kiwi_mcp.drivers.mcp.oauth.words import OAuth
from kiwi_mcp.primitives import sealed
from kiwi_mcp.primitives.http_request import prepare
from kiwi_mcp.primitives.key_file import file_key
from kiwi_mcp.primitives.sealed import Sealed
from kiwi_mcp.primitives.secrets import Secret

_FOLDER, _KEY = "logins", "sealing.key"


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept: who gave the tokens, to which client, for which server; and what the server asked for last."""

    authority: Authority | None = None
    resource: str = ""
    client: Client | None = None
    tokens: Tokens | None = None
    challenge: Challenge | None = None


@dataclass(slots=True)
class Account:
    """One server at one address, and the record of its login."""

    url: str
    oauth: OAuth
    web: Web
    _sealed: Sealed = field(repr=False)
    _read: tuple[tuple[int, int] | None, Record] | None = field(default=None, repr=False)

    def record(self) -> Record:
        """Return what is kept; what was kept for another address or another client counts as nothing."""
        mark = self._sealed.mark(self.oauth.name)
        if self._read is None or self._read[0] != mark:
            self._read = mark, self._opened()
        return self._read[1]

    def mended(self) -> Record:
        """Return what is kept; a record that does not open is removed, as whoever logs in makes another."""
        try:
            return self.record()
        except StoreDamaged:
            forget(self.oauth)
            return self.record()

    def keep(self, record: Record) -> None:
        """Put a record in the place of the one that is kept."""
        self._sealed.write(self.oauth.name, sealed.Record({"bound": self._bound, **_facts(record)}, _secrets(record)))

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Be the only one, of all processes, who changes what is kept."""
        async with self._sealed.held(self.oauth.name):
            yield

    def desk(self, record: Record) -> Desk | None:
        """Return where the next tokens are had with what is kept; None where that does not suffice."""
        if record.authority is None:
            return None
        client = owners_client(self.oauth, record.authority) or record.client
        return Desk(record.authority, client, record.resource, self.oauth, self.web) if client else None

    @property
    def _bound(self) -> str:
        """What the tokens are for: with another address or another client they are not sent."""
        words: Json = [
            self.url,
            self.oauth.client_id,
            self.oauth.issuer,
            self.oauth.grant,
            self.oauth.client_metadata_url,
        ]
        return sha256(compact(words).encode(errors="surrogatepass")).hexdigest()

    def _opened(self) -> Record:
        found = self._sealed.read(self.oauth.name)
        if found is None or found.facts.get("bound") != self._bound:
            return Record()
        facts, secrets = found.facts, found.secrets
        return Record(
            _authority(as_object(facts.get("authority"))),
            as_text(facts.get("resource")),
            Client.of(as_object(facts.get("client")), secrets.get("client")),
            Tokens.of(as_object(facts.get("tokens")), secrets.get("access"), secrets.get("refresh")),
            Challenge.of(as_object(facts["challenge"])) if facts.get("challenge") else None,
        )


def account_of(spec: HttpSpec, oauth: OAuth, secrets: Mapping[str, str]) -> Account:
    """Return the account of a server that is reached by a spec."""
    return Account(str(prepare(spec, secrets).url), oauth, Web(spec.granted, spec.denied, secrets), _sealed(oauth))


def forget(oauth: OAuth) -> bool:
    """Remove all that is kept of a server's login, and say whether there was anything."""
    return _sealed(oauth).remove(oauth.name)


def _sealed(oauth: OAuth) -> Sealed:
    return Sealed(oauth.folder / _FOLDER, file_key(oauth.folder / _KEY))


def _facts(record: Record) -> JsonObject:
    client = record.client if record.client and record.client.is_registered else None
    return {
        "authority": _kept(record.authority) if record.authority else {},
        "resource": record.resource,
        "client": client.to_json() if client else {},
        "tokens": record.tokens.to_json() if record.tokens else {},
        "challenge": record.challenge.to_json() if record.challenge else {},
    }


def _secrets(record: Record) -> Mapping[str, Secret]:
    found = {
        "access": record.tokens.access if record.tokens else None,
        "refresh": record.tokens.refresh if record.tokens else None,
        "client": record.client.secret if record.client else None,
    }
    return {word: secret for word, secret in found.items() if secret is not None}


def _kept(authority: Authority) -> JsonObject:
    """Return what renewing takes; for a login the authorization server is asked anew."""
    return {
        "issuer": authority.issuer,
        "token_endpoint": authority.token_endpoint,
        "methods": list(authority.methods),
        "takes_documents": authority.takes_documents,
    }


def _authority(record: JsonObject) -> Authority | None:
    if not as_text(record.get("issuer")):
        return None
    return Authority(
        issuer=as_text(record.get("issuer")),
        token_endpoint=as_text(record.get("token_endpoint")),
        methods=tuple(map(as_text, as_list(record.get("methods")))),
        takes_documents=record.get("takes_documents") is True,
    )
