"""Config and inputs to one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from urllib.parse import quote, urlsplit

from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.plan import HttpSpec, Plan, Retry
from kiwi_mcp.manifest.templates import (
    ABSENT,
    Piece,
    Values,
    defaulted,
    pieces,
    render,
    render_header,
    render_url,
    variables,
)

_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
_SOCKET_SCHEMES = {"ws", "wss"}


def bind_request(chain: Chain, inputs: JsonObject) -> Plan:
    """Return the plan of an api tool: the one request that its words and these inputs make."""
    tool = chain.tool
    config = tool.manifest.config
    spec = _request(config, _values(tool.manifest.parameters, inputs))
    sent: Json = [spec.url, dict(spec.headers), spec.body, list(spec.basic or ())]
    return Plan(
        identity=tool.identity,
        tool_digest=tool.digest,
        driver="http",
        chain=tuple((link.identity, link.digest) for link in chain.links),
        spec=spec,
        inputs=inputs,
        variables=variables(sent),
        defaulted=defaulted(sent),
        facts={"response_transform": config.get("response_transform")},
        effect=tool.manifest.effect or ("idempotent" if spec.method in _SAFE_METHODS else "at_most_once"),
    )


def _values(schema: JsonObject, inputs: JsonObject) -> Values:
    # A declared parameter that was not sent is absent, which is not the same as null.
    declared = as_object(schema.get("properties"))
    return {**dict.fromkeys(declared, ABSENT), **inputs}


def _request(config: JsonObject, values: Values) -> HttpSpec:
    auth = as_object(config.get("auth"))
    template = as_text(config.get("url_template")) or as_text(config.get("url"))
    url = render_url(_with_query(template, {**as_object(config.get("query")), **_auth_query(auth)}), values)
    body = render(config.get("send", config.get("body_template")), values)
    is_socket = urlsplit(url).scheme in _SOCKET_SCHEMES
    defaults = HttpSpec(method="GET", url="")
    return HttpSpec(
        method=as_text(config.get("method")).upper() or "GET",
        url=url,
        headers=_headers({**as_object(config.get("headers")), **auth_headers(auth, _secret(auth))}, values),
        body=body,
        has_body=body is not None,
        timeout=_number(config.get("timeout"), defaults.timeout),
        max_bytes=int(_number(config.get("max_bytes"), defaults.max_bytes)),
        max_redirects=int(_number(config.get("max_redirects"), defaults.max_redirects)),
        max_events=int(_number(config.get("max_events"), 1 if is_socket else defaults.max_events)),
        retry=_retry(config.get("retry")),
        stream="websocket" if is_socket else _stream(config.get("stream")),
        basic=basic_auth(auth),
    )


def _stream(word: Json) -> Literal["", "sse", "lines"]:
    match word:
        case "sse" | "lines":
            return word
        case _:
            return ""


def _with_query(url: str, query: JsonObject) -> str:
    """Return a URL template with the words of `query` added to it, each still a template."""
    pairs = [f"{quote(name, safe='')}={_encoded(text_of(value))}" for name, value in query.items()]
    if not pairs:
        return url
    base, mark, fragment = url.partition("#")
    return f"{base}{'&' if '?' in base else '?'}{'&'.join(pairs)}{mark}{fragment}"


def _encoded(template: str) -> str:
    # The text between placeholders is percent-encoded here; what fills them is encoded when the URL is rendered.
    def written(piece: Piece) -> str:
        match piece.kind:
            case "text":
                return quote(piece.text, safe="")
            case "name":
                return f"{{{piece.text}}}"
            case _:
                return piece.text

    return "".join(map(written, pieces(template)))


def _headers(written: JsonObject, values: Values) -> dict[str, str]:
    rendered = {name: render_header(text_of(template), values) for name, template in written.items()}
    return {name: value for name, value in rendered.items() if value is not None}


def auth_headers(auth: JsonObject, secret: str) -> Mapping[str, str]:
    """Return the header that carries a secret, as the `auth` of a manifest says."""
    match auth:
        case {"type": "bearer"}:
            return {"Authorization": f"Bearer {secret}"}
        case {"type": "api_key" | "header"} if auth.get("in") != "query":
            return {as_text(auth.get("name")) or as_text(auth.get("header")) or "X-API-Key": secret}
        case _:
            return {}


def _auth_query(auth: JsonObject) -> JsonObject:
    is_in_query = auth.get("type") == "api_key" and auth.get("in") == "query"
    return {as_text(auth.get("name")): _secret(auth)} if is_in_query else {}


def basic_auth(auth: JsonObject) -> tuple[str, str] | None:
    """Return the user name and the password, if the `auth` of a manifest has them."""
    return (as_text(auth.get("username")), as_text(auth.get("password"))) if auth.get("type") == "basic" else None


def _secret(auth: JsonObject) -> str:
    variable = as_text(auth.get("env_var"))
    return f"${{{variable}}}" if variable else as_text(auth.get("token")) or as_text(auth.get("key"))


def _retry(written: Json) -> Retry:
    if isinstance(written, int):
        return Retry(attempts=written + 1)
    words = as_object(written)
    if not words:
        return Retry()
    known = Retry()
    statuses = tuple(status for status in as_list(words.get("statuses")) if isinstance(status, int))
    return Retry(
        attempts=int(_number(words.get("attempts"), 3)),
        statuses=statuses or known.statuses,
        delay=_number(words.get("delay"), known.delay),
        max_delay=_number(words.get("max_delay"), known.max_delay),
    )


def _number(value: Json, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
