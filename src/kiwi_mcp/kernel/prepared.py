"""`Prepared`: an item that may run; those of one kernel, and what keeps each valid; the digest of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from operator import attrgetter
from os import environ
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.lockfile import NAME as LOCK
from kiwi_mcp.domain.calls import Call, Space
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.items import Chain, Needs
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec
from kiwi_mcp.drivers import Driver
from kiwi_mcp.kernel.settings import FILE_NAME as SETTINGS
from kiwi_mcp.kernel.store import Store as UserStore
from kiwi_mcp.manifest.signatures import canonical
from kiwi_mcp.policy.isolation import IsolationDecision, external_code, profile_of
from kiwi_mcp.policy.policy_files import rule_files
from kiwi_mcp.primitives.file_watch import watch


class Prepared(Struct):
    """An item that may run: what it runs on, who drives it, what it may use, and what its owner should know."""

    chain: Chain
    driver: Driver
    rights: Rights
    """The caller's rights, with what accepting a server granted to it."""
    lock_changes: tuple[str, ...]
    """How the chain differs from what was signed."""
    warnings: tuple[str, ...]
    isolation: IsolationDecision
    """The isolation level of the chain, and where each link comes from."""
    is_accepted: bool
    """Whether the owner accepted the MCP server that the chain runs on as it is."""
    names_code: bool
    """Whether the chain may name files as code that no digest covers."""
    needs: Needs
    """What the links of the chain need together."""
    rates: Mapping[str, int] = {}
    """The calls per minute that rules allow of the item."""
    _sandbox: tuple[SandboxProfile, tuple[str, ...]] | None = None

    def isolated(self, plan: Plan, space: Space) -> Plan:
        """Return a plan with the sandbox profile of its process, and the code that it runs besides its own."""
        if (sandbox := self._sandbox) is None:
            sandbox = profile_of(self.chain, self.needs, space, self.isolation, self.rights)
            if not self.needs.read and not self.needs.write:  # where files are needed, it depends on what is there
                self._sandbox = sandbox
        profile, warnings = sandbox
        code = external_code(self.chain) if self.names_code else ()
        # What runs and is in no digest of an item is part of the plan, so that an approval of the plan covers it too.
        facts = {**plan.facts, "code": dict(code)} if code else plan.facts
        return replace(plan, profile=profile, warnings=(*plan.warnings, *warnings), facts=facts)


_Key: TypeAlias = tuple[str, str | None, bool, str]
_KEPT = 4_096
_DEPLOYMENT = "KIWI_DEPLOYMENT"
"""The variable that names one more file with rules for this machine."""


class _Entry(Struct, frozen=True):
    """A prepared item, and the state of everything that it depends on."""

    prepared: Prepared
    store: tuple[object, int]
    rights: Rights
    generation: int
    deployment: str | None
    code: tuple[tuple[str, str], ...] | None
    """The code outside of all items that the chain names; None where it names none."""


class PreparedItems:
    """The prepared items of one kernel. Each is valid as long as nothing changed that it depends on.

    The catalog gives the same chain again as long as nothing changed that the chain depends on. Lockfiles, settings and
    rules are guarded by the generation of `file_watch.watch`, rows by the change counter of the store. The rights of
    the caller, the variable that names a deployment, and code outside of all items are compared at each call.
    """

    def __init__(self, user: Path, store: UserStore) -> None:
        self._user = user
        self._store = store
        self._known: dict[_Key, _Entry] = {}
        self._seen: dict[_Key, Chain] = {}
        """The chains that were prepared once: what changes at each call is not watched."""

    def get(self, call: Call, caller: str, catalog: Catalog, rights: Rights) -> Prepared | None:
        """Return the item of a call as it was prepared; None where it was not, or where anything may have changed."""
        entry = self._known.get((call.tool_id, call.item_type, call.is_frozen, caller))
        if (
            entry is None
            or (now := catalog.unchanged(call.tool_id, call.item_type)) is None  # this looks at the watch and the store
            or now.found is not entry.prepared.chain
            or now.generation != entry.generation
            or now.store_state != entry.store
            or (entry.rights is not rights and entry.rights != rights)
            or entry.deployment != environ.get(_DEPLOYMENT)
            or (entry.code is not None and entry.code != external_code(entry.prepared.chain))
        ):
            return None
        return entry.prepared

    def put(
        self, call: Call, caller: str, catalog: Catalog, rights: Rights, chain: Chain, prepare: Callable[[], Prepared]
    ) -> None:
        """Keep the item of a call whose chain was prepared twice without a change in between.

        It is prepared once more after all that it depends on is watched: a change before that is seen by this, a change
        after it by the watch.
        """
        key = (call.tool_id, call.item_type, call.is_frozen, caller)
        if key not in self._seen:
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen[key] = chain
            return
        chain = catalog.resolve(call.tool_id, item_type=call.item_type)
        if self._seen[key] is not chain or self._store.state() != self._store.state():
            self._seen[key] = chain
            return
        space = catalog.space
        locks = [str(space.project_ai / LOCK), str(space.user / LOCK)]
        generation = watch.watch([*locks, str(self._user / SETTINGS), *rule_files(self._user)])
        state, deployment = self._store.state(), environ.get(_DEPLOYMENT)
        prepared = prepare()
        if prepared.chain is not chain or not prepared.isolation.is_looked_up:
            return
        code = external_code(chain) if prepared.names_code else None
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[key] = _Entry(prepared, state, rights, generation, deployment, code)

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
        self._seen.clear()


_shown = attrgetter("method", "url", "timeout", "retry", "stream", "basic", "granted")
_requests: dict[tuple[object, ...], bytes] = {}
_REQUESTS_KEPT = 32


def plan_digest(plan: Plan) -> str:
    """Return the hash of `canonical(plan.to_json())`; what all calls of a tool have in common is written once."""
    variables, spec = canonical(list(plan.variables)) if plan.variables else b"[]", plan.spec
    if isinstance(spec, ProcessSpec):
        spec_text = b"".join(
            (
                b'{"argv":', _argv_text(spec.argv),
                b',"cwd":', _text(spec.cwd),
                b',"env":', _env_text(tuple(spec.env.items())),
                b',"primitive":"subprocess","stdin_sha256":"', sha256(spec.stdin).hexdigest().encode(),
                b'","timeout":', _timeout_text(spec.timeout),
                b"}",
            )
        )  # fmt: skip
    elif isinstance(spec, HttpSpec) and spec.body is None:
        # What is shown of a request without a body is often the same for every call of a tool.
        key = (*_shown(spec), *spec.headers.items())
        if (known := _requests.get(key)) is None:
            if len(_requests) >= _REQUESTS_KEPT:
                _requests.clear()
            known = _requests[key] = canonical(spec.to_json())
        spec_text = known
    else:
        spec_text = canonical(spec.to_json())
    text = b"".join(
        (
            b'{"chain":', _links_text(plan.chain),
            b',"digest":', _text(plan.tool_digest),
            b',"driver":', _text(plan.driver),
            b',"effect":', _text(plan.effect),
            b',"facts":', canonical(plan.facts) if plan.facts else b"{}",
            b',"identity":', _text(plan.identity),
            b',"inputs":', canonical(plan.inputs),
            b',"jail":', _profile_text(plan.profile),
            b',"spec":', spec_text,
            b',"variables":', variables,
            b"}",
        )
    )  # fmt: skip
    return sha256(text).hexdigest()


@lru_cache(maxsize=256)
def _profile_text(profile: SandboxProfile | None) -> bytes:
    return canonical(profile.to_json() if profile else None)


@lru_cache(maxsize=256)
def _links_text(links: tuple[tuple[str, str], ...]) -> bytes:
    return canonical([{"identity": identity, "digest": digest} for identity, digest in links])


# Few are kept of what may hold parameters: each can be large.
@lru_cache(maxsize=32)
def _env_text(env: tuple[tuple[str, str], ...]) -> bytes:
    return canonical(dict(env))


_argv_text = lru_cache(maxsize=32)(canonical)
_text = lru_cache(maxsize=1_024)(canonical)
_timeout_text = lru_cache(maxsize=64)(canonical)
