"""Access tokens of an identity provider on this machine: invalid ones are refused, also if the provider is silent."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY
from mcp_types.version import LATEST_MODERN_VERSION
from tests.plugins.http_server import HttpReply, HttpRequest, http_server
from tests.surfaces.gateway.conftest import ServeTools, Tools

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest, KiwiError, TokenRefused, Unavailable
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.surfaces.gateway import mcp as mcp_endpoint
from kiwi_mcp.surfaces.gateway import oauth as access_module
from kiwi_mcp.surfaces.gateway import oauth as issuer_module
from kiwi_mcp.surfaces.gateway.oauth import IdentityProvider, TokenVerifier, VerifiedToken, oauth_settings

Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
AUDIENCE = "https://kiwi.test/mcp"
PATHS = ("/.well-known/oauth-authorization-server", "/.well-known/openid-configuration")
RSA_KEY = rsa.generate_private_key(65_537, 2_048)
OTHER_KEY = rsa.generate_private_key(65_537, 2_048)
ENVELOPE: JsonObject = {PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION, CLIENT_CAPABILITIES_META_KEY: {}}
CALL: JsonObject = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {
        "name": "help",
        "arguments": {},
        "_meta": ENVELOPE,
    },
}
HEADERS = {"mcp_protocol_version": LATEST_MODERN_VERSION, "mcp_method": "tools/call", "mcp_name": "help"}


@dataclass
class Provider:
    """An identity provider: what it publishes, what it was asked for, and tokens that it makes out."""

    url: str = ""
    path: str = PATHS[0]
    metadata: dict[str, Json] = field(default_factory=dict)
    keys: list[Json] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def publish(self, key: Key, kid: str = "one", **words: Json) -> None:
        self.keys.append({**jwk_of(key), "kid": kid, "use": "sig", **words})

    def claims(self, **changed: Json) -> dict[str, Json]:
        now = int(time.time())
        usual: dict[str, Json] = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "exp": now + 600,
            "iat": now,
            "scope": "openid kiwi:tools",
        }
        return {name: value for name, value in {**usual, **changed}.items() if value is not None}

    def token(self, key: Key = RSA_KEY, algorithm: str = "RS256", kid: str | None = "one", **changed: Json) -> str:
        return jwt.encode(self.claims(**changed), key, algorithm, headers={"kid": kid} if kid else None)

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        if path == self.path:
            described: dict[str, Json] = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
            return 200, json.dumps({**described, **self.metadata}).encode()
        if path == "/keys":
            return 200, json.dumps({"keys": self.keys}).encode()
        return 404, b"{}"


def jwk_of(key: Key) -> dict[str, Json]:
    is_curve = isinstance(key, ec.EllipticCurvePrivateKey)
    name = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256" if is_curve else "EdDSA"
    made: dict[str, Json] = json.loads(jwt.get_algorithm_by_name(name).to_jwk(key.public_key()))
    return {word: value for word, value in made.items() if word != "key_ops"}


@pytest.fixture
def provider(loopback: None) -> Iterator[Provider]:
    made = Provider()

    def answer(request: HttpRequest) -> HttpReply:
        status, body = made.answer(request.path)
        return HttpReply(body, status)

    with http_server(answer) as host:
        made.url = f"http://{host}"
        made.publish(RSA_KEY)
        yield made


def verify(provider: Provider, *tokens: str, audience: str = AUDIENCE) -> list[VerifiedToken | KiwiError]:
    """Return whom each token stands for, or why it is refused; one after the other, by one verifier."""

    async def story() -> list[VerifiedToken | KiwiError]:
        access, found = TokenVerifier(IdentityProvider(provider.url, audience)), list[VerifiedToken | KiwiError]()
        for token in tokens:
            try:
                found.append(await access.verify(token))
            except KiwiError as error:
                found.append(error)
        await access.aclose()
        return found

    return asyncio.run(story())


def part(value: Json) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def test_a_token_of_the_provider_identifies_its_subject(provider: Provider) -> None:
    (one,) = verify(provider, provider.token())
    assert isinstance(one, VerifiedToken)
    assert one.name == f"{provider.url} ada"
    assert one.scopes == {"openid", "kiwi:tools"}


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        (RSA_KEY, "RS256"),
        (RSA_KEY, "PS256"),
        (ec.generate_private_key(ec.SECP256R1()), "ES256"),
        (ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
    ],
)
def test_every_listed_signature_algorithm_is_accepted(provider: Provider, key: Key, algorithm: str) -> None:
    provider.keys.clear()
    provider.publish(key, "k")
    (one,) = verify(provider, provider.token(key, algorithm, "k"))
    assert isinstance(one, VerifiedToken)


@pytest.mark.case("GW-02", "GW-03")
@pytest.mark.parametrize(
    "changed",
    [
        {"aud": "https://other.test/mcp"},
        {"aud": ["https://other.test/mcp", f"{AUDIENCE}/"]},
        {"aud": None},
        {"iss": "https://other.test"},
        {"iss": None},
        {"sub": None},
        {"sub": ""},
        {"sub": "a\nb"},
        {"sub": "x" * 300},
        {"exp": None},
        {"exp": int(time.time()) - 60},
        {"exp": "soon"},
        {"exp": 1e400},
        {"nbf": int(time.time()) + 86_400},
        {"iat": int(time.time()) + 86_400},
        {"cnf": {"jkt": "x"}},
    ],
)
def test_a_token_with_a_wrong_claim_is_refused(provider: Provider, changed: dict[str, Json]) -> None:
    token = jwt.encode(provider.claims(**changed), RSA_KEY, "RS256", headers={"kid": "one"})
    (one,) = verify(provider, token)
    assert isinstance(one, TokenRefused)
    assert "ada" not in f"{one.message}{one.suggestion}"


@pytest.mark.case("GW-03")
def test_clocks_may_differ_by_thirty_seconds(provider: Provider) -> None:
    now = int(time.time())
    late, early = provider.token(exp=now - 10), provider.token(nbf=now + 10, iat=now + 10)
    assert all(isinstance(one, VerifiedToken) for one in verify(provider, late, early))


@pytest.mark.case("GW-02")
def test_a_token_that_the_provider_did_not_sign_is_refused(provider: Provider) -> None:
    good = provider.token()
    head, claims, signature = good.split(".")
    public = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    # Libraries do not sign with a public key as a shared secret any more, so it is done by hand.
    secret_head = part({"alg": "HS256", "typ": "JWT", "kid": "one"})
    hmac = jwt.get_algorithm_by_name("HS256")
    forged = base64.urlsafe_b64encode(hmac.sign(f"{secret_head}.{claims}".encode(), public)).rstrip(b"=").decode()
    tokens = [
        f"{part({'alg': 'none'})}.{claims}.",
        f"{part({'alg': 'None', 'kid': 'one'})}.{claims}.{signature}",
        f"{secret_head}.{claims}.{forged}",
        provider.token(OTHER_KEY),
        jwt.encode(provider.claims(), OTHER_KEY, "RS256", headers={"kid": "one", "jwk": jwk_of(OTHER_KEY)}),
        jwt.encode(provider.claims(), OTHER_KEY, "RS256", headers={"kid": "one", "jku": "http://evil.test/keys"}),
        jwt.encode(provider.claims(), RSA_KEY, "RS512", headers={"kid": "one"}),
        jwt.encode(provider.claims(), RSA_KEY, "RS256", headers={"kid": "one", "typ": "logout+jwt"}),
        jwt.encode(provider.claims(), RSA_KEY, "RS256", headers={"kid": "one", "crit": ["x"], "x": 1}),
        f"{head}.{part({**provider.claims(), 'sub': 'eve'})}.{signature}",
        f"{head}.{claims}.{signature[:-4]}",
        f"{head}.{claims}.",
        "a.b.c",
        "..",
        f"{part([])}.{claims}.{signature}",
    ]
    assert [type(one) for one in verify(provider, *tokens)] == [TokenRefused] * len(tokens)
    assert isinstance(verify(provider, good)[0], VerifiedToken)


def test_a_key_for_another_algorithm_is_not_used(provider: Provider) -> None:
    provider.keys.clear()
    provider.publish(RSA_KEY, "enc", use="enc")
    provider.publish(RSA_KEY, "ps", alg="PS256")
    short = rsa.generate_private_key(65_537, 1_024)
    provider.publish(short, "short")
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        weak = provider.token(short, kid="short")
    provider.keys += [{"kid": "broken", "kty": "RSA", "n": "x"}, {"kid": "oct", "kty": "oct", "k": "c2VjcmV0"}, 7, None]
    refused = [provider.token(kid="enc"), provider.token(kid="ps"), provider.token(kid="broken"), weak]
    assert [type(one) for one in verify(provider, *refused)] == [TokenRefused] * 4
    assert isinstance(verify(provider, provider.token(RSA_KEY, "PS256", "ps"))[0], VerifiedToken)


def test_a_token_without_a_key_id_is_accepted_only_with_a_single_key(provider: Provider) -> None:
    assert isinstance(verify(provider, provider.token(kid=None))[0], VerifiedToken)
    provider.publish(OTHER_KEY, "two")
    assert isinstance(verify(provider, provider.token(kid=None))[0], TokenRefused)


async def test_keys_are_fetched_once_and_again_after_a_rotation(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_module, "_PAUSE", 0.0)
    old = provider.token()

    access = TokenVerifier(IdentityProvider(provider.url, AUDIENCE))
    for _ in range(5):
        await access.verify(old)
    assert provider.asked == [PATHS[0], "/keys"]
    provider.keys.clear()
    provider.publish(OTHER_KEY, "two")
    assert (await access.verify(provider.token(OTHER_KEY, kid="two"))).name
    with pytest.raises(TokenRefused):
        await access.verify(old)
    await access.aclose()


def test_a_flood_of_unknown_keys_asks_the_provider_once_a_minute(provider: Provider) -> None:
    tokens = [provider.token(), *(provider.token(kid=f"k{number}") for number in range(50))]
    found = verify(provider, *tokens)
    assert [type(one) for one in found[1:]] == [TokenRefused] * 50
    assert len(provider.asked) == 2


async def test_concurrent_requests_wait_for_one_answer_of_the_provider(provider: Provider) -> None:
    access = TokenVerifier(IdentityProvider(provider.url, AUDIENCE))
    await asyncio.gather(*(access.verify(provider.token(sub=f"u{number}")) for number in range(30)))
    await access.aclose()
    assert provider.asked == [PATHS[0], "/keys"]


def test_an_unreachable_provider_admits_no_token(provider: Provider) -> None:
    token = provider.token()
    unreachable = Provider("http://127.0.0.1:9")
    (one,) = verify(unreachable, token)
    assert isinstance(one, Unavailable)
    provider.path = "/elsewhere"
    assert isinstance(verify(provider, token)[0], Unavailable)


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "http://127.0.0.1:1"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": "http://keys.test/keys"},
        {"jwks_uri": "https://["},
        {"jwks_uri": ""},
        {"jwks_uri": 7},
    ],
)
def test_a_provider_with_invalid_metadata_admits_no_token(provider: Provider, metadata: dict[str, Json]) -> None:
    provider.metadata = metadata
    (one,) = verify(provider, provider.token())
    assert isinstance(one, Unavailable)


def test_the_metadata_is_found_at_the_openid_connect_location(provider: Provider) -> None:
    provider.path = PATHS[1]
    assert isinstance(verify(provider, provider.token())[0], VerifiedToken)


async def test_cached_keys_work_for_a_limited_time_while_the_provider_is_silent(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_module, "_FRESH", -1.0)
    monkeypatch.setattr(issuer_module, "_RETRY", 0.0)

    access = TokenVerifier(IdentityProvider(provider.url, AUDIENCE))
    token = provider.token()
    await access.verify(token)
    provider.path = "/elsewhere"
    assert (await access.verify(token)).name
    monkeypatch.setattr(issuer_module, "_STALE", -1.0)
    with pytest.raises(Unavailable):
        await access.verify(token)
    await access.aclose()


def at_the_door(serving_tools: ServeTools, provider: Provider, story: Callable[[Tools], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(120), serving_tools(oauth=IdentityProvider(provider.url, AUDIENCE)) as served:
            await story(served)

    asyncio.run(in_time())


def test_a_client_finds_the_provider_and_uses_tools_with_its_token(
    serving_tools: ServeTools, provider: Provider
) -> None:
    async def story(served: Tools) -> None:
        refused = await served.post("", CALL, **HEADERS)
        metadata_url = "https://kiwi.test/.well-known/oauth-protected-resource/mcp"
        assert refused.status_code == 401
        response = f'Bearer resource_metadata="{metadata_url}", scope="kiwi:tools"'
        assert refused.headers["www-authenticate"] == response
        for path in ("", "/mcp"):
            at = served.url.replace("/mcp", f"/.well-known/oauth-protected-resource{path}")
            described = (await served.bare.get(at)).json()
            assert (described["resource"], described["authorization_servers"]) == (AUDIENCE, [provider.url])
            assert described["scopes_supported"] == ["kiwi:tools"]
        assert (await served.post(provider.token(), CALL, **HEADERS)).status_code == 200
        assert (await served.post(served.token(), CALL, **HEADERS)).status_code == 200  # Kiwi's own beside it
        assert (await served.post(provider.token(), CALL, host="kiwi.test", **HEADERS)).status_code == 200

    at_the_door(serving_tools, provider, story)


def test_a_refused_token_gets_a_standard_challenge(serving_tools: ServeTools, provider: Provider) -> None:
    async def story(served: Tools) -> None:
        expired = provider.token(exp=int(time.time()) - 600)
        for _ in range(40):  # however often: a client has to hear that it needs another one
            answer = await served.post(expired, CALL, **HEADERS)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith('Bearer error="invalid_token", resource_metadata="')
        for scope in (None, "openid", "kiwi:toolsx", "kiwi: tools"):
            lacking = await served.post(provider.token(scope=scope), CALL, **HEADERS)
            assert lacking.status_code == 403
            assert lacking.headers["www-authenticate"].startswith('Bearer error="insufficient_scope"')
        listed = provider.token(scope=None, scp=["kiwi:tools"])
        assert (await served.post(listed, CALL, **HEADERS)).status_code == 200

    at_the_door(serving_tools, provider, story)


def test_a_listener_ends_with_its_token(
    serving_tools: ServeTools, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_module, "_LEEWAY", 0)
    monkeypatch.setattr(mcp_endpoint, "_LOOK_SECONDS", 0.05)
    news: JsonObject = {"_meta": ENVELOPE, "notifications": {"toolsListChanged": True}}
    listen: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": news}

    async def story(served: Tools) -> None:
        token = provider.token(exp=int(time.time()) + 2)
        headers = {"mcp_protocol_version": LATEST_MODERN_VERSION, "mcp_method": "subscriptions/listen"}
        with pytest.raises(httpx2.RemoteProtocolError):
            await served.post(token, listen, **headers)
        assert (await served.post(token, CALL, **HEADERS)).status_code == 401

    at_the_door(serving_tools, provider, story)


def test_an_access_token_is_valid_for_tools_only(serving_tools: ServeTools, provider: Provider) -> None:
    async def story(served: Tools) -> None:
        words = {"Authorization": f"Bearer {provider.token()}"}
        answer = await served.bare.get(served.url.replace("/mcp", "/registry/index.json"), headers=words)
        assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted")

    at_the_door(serving_tools, provider, story)


def test_an_unreachable_provider_is_reported_and_own_tokens_still_work(
    serving_tools: ServeTools, provider: Provider
) -> None:
    provider.path = "/elsewhere"

    async def story(served: Tools) -> None:
        answer = await served.post(provider.token(), CALL, **HEADERS)
        assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"]
        assert (await served.post(served.token(), CALL, **HEADERS)).status_code == 200

    at_the_door(serving_tools, provider, story)


def test_the_provider_is_configured_by_options_or_by_a_file(tmp_path: Path) -> None:
    assert oauth_settings(tmp_path) is None
    (tmp_path / "gateway.yaml").write_text(f"issuer: https://id.test/realm\naudience: {AUDIENCE}\n")
    (tmp_path / "gateway.yaml").chmod(0o600)
    assert oauth_settings(tmp_path) == IdentityProvider("https://id.test/realm", AUDIENCE, "kiwi:tools")
    assert oauth_settings(tmp_path, scope="use", issuer="https://b.test") == IdentityProvider(
        "https://b.test", AUDIENCE, "use"
    )


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ({"issuer": "https://id.test"}, "audience"),
        ({"audience": AUDIENCE}, "issuer"),
        ({"issuer": "http://id.test", "audience": AUDIENCE}, "issuer"),
        ({"issuer": "https://id.test?x=1", "audience": AUDIENCE}, "issuer"),
        ({"issuer": "https://u:p@id.test", "audience": AUDIENCE}, "issuer"),
        ({"issuer": "https://id.test", "audience": 'https://k.test/"x'}, "audience"),
        ({"issuer": "https://id.test", "audience": "kiwi"}, "audience"),
        ({"issuer": "https://[", "audience": AUDIENCE}, "issuer"),
        ({"issuer": "https://id.test", "audience": AUDIENCE, "scope": "two words"}, "scope"),
    ],
)
def test_an_untrustworthy_provider_is_refused(tmp_path: Path, words: dict[str, str], place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        oauth_settings(tmp_path, **words)
    assert place in refused.value.message


@pytest.mark.parametrize("text", ["[]", "issuer: 7\n", f"issuer: https://i.test\naudience: {AUDIENCE}\nkey: x\n", "\t"])
def test_an_invalid_or_public_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(InvalidManifest):
        oauth_settings(tmp_path)
    file.write_text(f"issuer: https://i.test\naudience: {AUDIENCE}\n")
    file.chmod(0o666)
    with pytest.raises(InvalidManifest):
        oauth_settings(tmp_path)
