"""What a manifest says about the tokens of its server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_text

Grant: TypeAlias = Literal["authorization_code", "client_credentials"]


@dataclass(frozen=True, slots=True)
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
    """Like the secret, the name of a variable: `${NAME}`."""
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
        """All words in which variables stand."""
        return [self.client_secret, self.private_key]


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
