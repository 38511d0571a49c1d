"""The http driver: config and inputs to one request, its reply to an outcome, JSONPath on the reply."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import lru_cache
from typing import Literal, cast
from urllib.parse import quote, urlsplit

from jsonpath import JSONPath, JSONPathEnvironment, JSONPathError
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.outcome import Outcome, Progress, Report
from kiwi_mcp.domain.plan import REPEATABLE, HttpSpec, Plan, Retry
from kiwi_mcp.drivers import Dispatch, Driver
from kiwi_mcp.drivers.output import NotJsonOutput, parse
from kiwi_mcp.manifest.templates import (
    ABSENT,
    Values,
    defaulted,
    pieces,
    render,
    render_header,
    render_url,
    variables,
)
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.traffic_log import TrafficLog

_COST_LIMIT = 5_000_000
"""The most nodes a path may visit: the size of the reply, to the power of the path's searches in depth."""

_environment = JSONPathEnvironment(strict=True)
# A regular expression in a filter can take for ever on a short text, and nothing can interrupt it.
for _name in ("match", "search"):
    del _environment.function_extensions[_name]


def transform(path: str, reply: Json) -> Json:
    """Return what the path names: one value where it can name only one, else the list of all it names."""
    compiled = compile_path(path)
    # A filter that begins at the root again looks at the whole reply for each of its nodes.
    depth = max(1, path.count("..")) + path.count("$") - 1
    size = _count(reply)
    if size**depth > _COST_LIMIT:
        raise TooLarge(f"The reply, for {path!r},", size=None, limit=_COST_LIMIT, unit="steps")
    found = cast("list[Json]", compiled.findall(reply))
    if compiled.singular_query():
        return found[0] if found else None
    return found


@lru_cache(maxsize=256)
def compile_path(path: str) -> JSONPath:
    """Return the compiled path; regular expressions are not part of it."""
    try:
        compiled = _environment.compile(path)
    except (JSONPathError, RecursionError) as error:
        reason = str(error).partition("\n")[0] or "is nested too deeply"
        issue = Issue("config.response_transform", reason, "Write an RFC 9535 path such as `$.items[0:5].name`.")
        raise InvalidManifest("The tool", [issue]) from error
    assert isinstance(compiled, JSONPath)  # noqa: S101 - the strict environment makes no compound paths
    return compiled


def _count(value: Json) -> int:
    total, waiting = 0, [value]
    while waiting:
        node = waiting.pop()
        total += 1
        if isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return total


_FIRST_FAILURE = 400
_HINTS = {
    401: "The service does not accept the credentials: look at the variables the tool uses (`why`).",
    403: "The service refuses these credentials for this request.",
    404: "The service has nothing at this address: look at the tool's url and the parameters.",
    429: "The service asks for fewer requests: wait, or give the tool a `retry`.",
}


class Http(Driver):
    """Makes the one request of an api tool."""

    def check(self, chain: Chain, space: Space) -> None:
        """Refuse an invalid path to the result in a reply."""
        compile_path(as_text(chain.tool.manifest.config.get("response_transform")) or "$")

    async def aclose(self) -> None:
        """Close the connections that are kept between calls."""
        await client.aclose()

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan the request."""
        return bind_request(chain, inputs)

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Check nothing: no process is started."""

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Send the request and give its reply as a result."""
        assert isinstance(plan.spec, HttpSpec)  # noqa: S101 - bind above makes no other
        ledger = TrafficLog()
        spec = plan.spec
        report = caller.report
        if caller.journal is not None:
            caller.journal.confirm()
            # The key is the same whenever this call of a thread is repeated.
            if not any(name.lower() == "idempotency-key" for name in spec.headers):
                spec = replace(spec, headers={**spec.headers, "Idempotency-Key": caller.origin.key})
        try:
            if not spec.stream:
                reply = await client.send(spec, secrets=secrets, report=report, ledger=ledger)
                return replace(_outcome(reply, as_text(plan.facts.get("response_transform"))), sent=ledger.to_json())
            received: list[Json] = []
            async with aclosing(_stream(spec, secrets, report, ledger)) as stream:
                async for item in stream:
                    received.append(item)
                    report(Progress(f"{len(received)} received", done=len(received)))
            return Outcome("success", received, sent=ledger.to_json())
        except KiwiError as error:
            if error.details.get("cause") != "timeout":
                raise
            sent = ledger.to_json()
            details = error.details
            return Outcome("timeout", message=error.message, suggestion=error.suggestion, details=details, sent=sent)


async def _stream(
    spec: HttpSpec, secrets: Mapping[str, str], report: Report, ledger: TrafficLog
) -> AsyncGenerator[Json, None]:
    match spec.stream:
        case "sse":
            async for event in client.events(spec, secrets=secrets, report=report, ledger=ledger):
                yield {"event": event.event, "data": _parsed(event.data), "id": event.id}
        case "lines":
            async for line in client.lines(spec, secrets=secrets, report=report, ledger=ledger):
                yield _parsed(line)
        case _:
            async for message in client.websocket(spec, secrets=secrets, ledger=ledger):
                yield _parsed(message) if isinstance(message, str) else {"base64": b64encode(message).decode("ascii")}


def _outcome(reply: client.HttpReply, path: str) -> Outcome:
    details: dict[str, Json] = {"http_status": reply.status}
    if reply.is_truncated:
        details["truncated"] = True
    if reply.attempts > 1:
        details["attempts"] = reply.attempts
    body = _decoded(reply)
    if reply.status >= _FIRST_FAILURE:
        return Outcome(
            "error",
            result=body,
            message=f"The service answered {reply.status}.",
            suggestion=_HINTS.get(reply.status, "The reply's body says more; check the parameters, then try again."),
            details=details,
        )
    return Outcome("success", result=transform(path, body) if path else body, details=details)


def _decoded(reply: client.HttpReply) -> Json:
    media_type = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not reply.body:
        return None
    try:
        text = reply.body.decode("utf-8")
    except UnicodeDecodeError:
        return {"media_type": media_type, "base64": b64encode(reply.body).decode("ascii")}
    return _parsed(text) if not media_type or media_type.endswith("json") else text


def _parsed(text: str) -> Json:
    """Return the JSON value a text is, or the text itself."""
    try:
        return parse(text.encode()).value
    except NotJsonOutput:
        return text


_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
_SOCKET_SCHEMES = {"ws", "wss"}
_STREAMS: Mapping[str, Literal["sse", "lines"]] = {"sse": "sse", "lines": "lines"}


def bind_request(chain: Chain, inputs: JsonObject) -> Plan:
    """Return the plan of an api tool: the one request that its words and these inputs make."""
    tool = chain.tool
    config = tool.manifest.config
    # A declared parameter that was not sent is absent, which is not the same as null.
    declared = as_object(tool.manifest.parameters.get("properties"))
    spec = _request(config, {**dict.fromkeys(declared, ABSENT), **inputs})
    effect = tool.manifest.effect or ("idempotent" if spec.method in _SAFE_METHODS else "at_most_once")
    sent: Json = [spec.url, dict(spec.headers), spec.body, list(spec.basic or ())]
    return Plan(
        identity=tool.identity,
        tool_digest=tool.digest,
        driver="http",
        chain=tuple((link.identity, link.digest) for link in chain.links),
        spec=replace(spec, is_repeatable=effect in REPEATABLE),
        inputs=inputs,
        variables=variables(sent),
        defaulted=defaulted(sent),
        facts={"response_transform": config.get("response_transform")},
        effect=effect,
    )


def _request(config: JsonObject, values: Values) -> HttpSpec:
    auth = as_object(config.get("auth"))
    variable = as_text(auth.get("env_var"))
    secret = f"${{{variable}}}" if variable else as_text(auth.get("token")) or as_text(auth.get("key"))
    query = dict(as_object(config.get("query")))
    if auth.get("type") == "api_key" and auth.get("in") == "query":
        query[as_text(auth.get("name"))] = secret
    url = render_url(_with_query(as_text(config.get("url_template")) or as_text(config.get("url")), query), values)
    written = {**as_object(config.get("headers")), **auth_headers(auth, secret)}
    headers = {name: render_header(text_of(template), values) for name, template in written.items()}
    body = render(config.get("send", config.get("body_template")), values)
    is_socket = urlsplit(url).scheme in _SOCKET_SCHEMES
    defaults = HttpSpec(method="GET", url="")
    return HttpSpec(
        method=as_text(config.get("method")).upper() or "GET",
        url=url,
        headers={name: value for name, value in headers.items() if value is not None},
        body=body,
        has_body=body is not None,
        timeout=_number(config.get("timeout"), defaults.timeout),
        max_bytes=int(_number(config.get("max_bytes"), defaults.max_bytes)),
        max_redirects=int(_number(config.get("max_redirects"), defaults.max_redirects)),
        max_events=int(_number(config.get("max_events"), 1 if is_socket else defaults.max_events)),
        retry=_retry(config.get("retry")),
        stream="websocket" if is_socket else _STREAMS.get(as_text(config.get("stream")), ""),
        basic=basic_auth(auth),
    )


def _with_query(url: str, query: JsonObject) -> str:
    """Return a URL template with the words of `query` added to it, each still a template."""
    pairs = [f"{quote(name, safe='')}={_encoded(text_of(value))}" for name, value in query.items()]
    if not pairs:
        return url
    base, mark, fragment = url.partition("#")
    return f"{base}{'&' if '?' in base else '?'}{'&'.join(pairs)}{mark}{fragment}"


def _encoded(template: str) -> str:
    # The text between placeholders is percent-encoded here; what fills them is encoded when the URL is rendered.
    written = []
    for piece in pieces(template):
        match piece.kind:
            case "text":
                written.append(quote(piece.text, safe=""))
            case "name":
                written.append(f"{{{piece.text}}}")
            case _:
                written.append(piece.text)
    return "".join(written)


def auth_headers(auth: JsonObject, secret: str) -> Mapping[str, str]:
    """Return the header that carries a secret, as the `auth` of a manifest says."""
    match auth:
        case {"type": "bearer"}:
            return {"Authorization": f"Bearer {secret}"}
        case {"type": "api_key" | "header"} if auth.get("in") != "query":
            return {as_text(auth.get("name")) or as_text(auth.get("header")) or "X-API-Key": secret}
        case _:
            return {}


def basic_auth(auth: JsonObject) -> tuple[str, str] | None:
    """Return the user name and the password, if the `auth` of a manifest has them."""
    return (as_text(auth.get("username")), as_text(auth.get("password"))) if auth.get("type") == "basic" else None


def _retry(written: Json) -> Retry:
    words, known = as_object(written), Retry()
    if isinstance(written, int):
        return Retry(attempts=written + 1)
    if not words:
        return known
    return Retry(
        attempts=int(_number(words.get("attempts"), 3)),
        statuses=tuple(one for one in as_list(words.get("statuses")) if isinstance(one, int)) or known.statuses,
        delay=_number(words.get("delay"), known.delay),
        max_delay=_number(words.get("max_delay"), known.max_delay),
    )


def _number(value: Json, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


create_driver = Http
