"""The digest of a plan: what names exactly this plan, in approvals, runs and receipts."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter

from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec, ReadSpec
from kiwi_mcp.manifest.digest import canonical, sha256_hex

_shown = attrgetter("method", "url", "timeout", "retry", "stream", "basic", "granted")
_requests: dict[tuple[object, ...], bytes] = {}
_REQUESTS_KEPT = 32


def plan_digest(plan: Plan) -> str:
    """Return the hash that names exactly this plan: of the canonical form of what it shows."""
    return sha256_hex(_plan_text(plan))


def _plan_text(plan: Plan) -> bytes:
    """Return `canonical(plan.to_json())`, of which what all calls of a tool have in common is written once."""
    variables = canonical(list(plan.variables)) if plan.variables else b"[]"
    return b"".join(
        (
            b'{"chain":', _links_text(plan.chain),
            b',"digest":', _text(plan.tool_digest),
            b',"driver":', _text(plan.driver),
            b',"effect":', _text(plan.effect),
            b',"facts":', canonical(plan.facts),
            b',"identity":', _text(plan.identity),
            b',"inputs":', canonical(plan.inputs),
            b',"jail":', _jail_text(plan.jail),
            b',"spec":', _spec_text(plan.spec),
            b',"variables":', variables,
            b"}",
        )
    )  # fmt: skip


def _spec_text(spec: ProcessSpec | HttpSpec | ReadSpec) -> bytes:
    match spec:
        case ProcessSpec():
            return _process_text(spec)
        case HttpSpec(body=None):
            return _request_text(spec)
        case _:
            return canonical(spec.to_json())


def _request_text(spec: HttpSpec) -> bytes:
    """Return what is shown of a request without a body, which is often the same for every call of a tool."""
    key = (*_shown(spec), *spec.headers.items())
    if (known := _requests.get(key)) is None:
        if len(_requests) >= _REQUESTS_KEPT:
            _requests.clear()
        known = _requests[key] = canonical(spec.to_json())
    return known


def _process_text(spec: ProcessSpec) -> bytes:
    return b"".join(
        (
            b'{"argv":', _argv_text(spec.argv),
            b',"cwd":', _text(spec.cwd),
            b',"env":', _env_text(tuple(spec.env.items())),
            b',"primitive":"subprocess","stdin_sha256":"', sha256_hex(spec.stdin).encode(),
            b'","timeout":', _timeout_text(spec.timeout),
            b"}",
        )
    )  # fmt: skip


@lru_cache(maxsize=256)
def _jail_text(jail: Jail | None) -> bytes:
    return canonical(jail.to_json() if jail else None)


@lru_cache(maxsize=256)
def _links_text(links: tuple[tuple[str, str], ...]) -> bytes:
    return canonical([{"identity": identity, "digest": digest} for identity, digest in links])


# Few are kept of what may hold parameters: each can be large.
@lru_cache(maxsize=32)
def _argv_text(argv: tuple[str, ...]) -> bytes:
    return canonical(argv)


@lru_cache(maxsize=32)
def _env_text(env: tuple[tuple[str, str], ...]) -> bytes:
    return canonical(dict(env))


@lru_cache(maxsize=1_024)
def _text(word: str) -> bytes:
    return canonical(word)


@lru_cache(maxsize=64)
def _timeout_text(seconds: float) -> bytes:
    return canonical(seconds)
