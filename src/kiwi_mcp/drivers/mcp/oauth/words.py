"""What a manifest says about the tokens of its server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_text
from kiwi_mcp.primitives.secrets import reveal

Grant: TypeAlias = Literal["authorization_code", "client_credentials"]


@dataclass(frozen=True, slots=True, repr=False)
class OAuth:
    """How the tokens of a server are had: by a person who logs in, or by credentials of Kiwi's own."""

    name: str
    """What they are kept under: the server, as one manifest in one place describes it."""
    folder: Path
    """The folder of the user's state."""
    grant: Grant = "authorization_code"
    client_id: str = ""
    client_secret: str = ""
    private_key: str = ""
    signing_algorithm: str = "ES256"
    token_auth: str = ""
    client_metadata_url: str = ""
    issuer: str = ""
    scopes: tuple[str, ...] = ()
    redirect_port: int = 0
    is_declared: bool = False
    """Whether the manifest says that tokens are needed; otherwise the server's own answer does."""

    @property
    def words(self) -> Json:
        """All words in which variables may stand."""
        return [self.client_id, self.client_secret, self.private_key, self.client_metadata_url, self.issuer]

    def revealed(self, secrets: Mapping[str, str]) -> OAuth:
        """Return the words with their secrets in place."""
        return replace(
            self,
            client_id=reveal(self.client_id, secrets),
            client_secret=reveal(self.client_secret, secrets),
            private_key=reveal(self.private_key, secrets),
            client_metadata_url=reveal(self.client_metadata_url, secrets),
            issuer=reveal(self.issuer, secrets),
        )


def oauth_words(auth: JsonObject, name: str, folder: Path) -> OAuth:
    """Return what the `auth` of a manifest says; nothing is as good as an empty one, since servers can ask later."""
    port = auth.get("redirect_port")
    return OAuth(
        name,
        folder,
        grant="client_credentials" if auth.get("grant") == "client_credentials" else "authorization_code",
        client_id=as_text(auth.get("client_id")),
        client_secret=as_text(auth.get("client_secret")),
        private_key=as_text(auth.get("private_key")),
        signing_algorithm=as_text(auth.get("signing_algorithm")) or "ES256",
        token_auth=as_text(auth.get("token_auth")),
        client_metadata_url=as_text(auth.get("client_metadata_url")),
        issuer=as_text(auth.get("issuer")),
        scopes=tuple(map(as_text, as_list(auth.get("scopes")))),
        redirect_port=port if isinstance(port, int) else 0,
        is_declared=auth.get("type") == "oauth",
    )
