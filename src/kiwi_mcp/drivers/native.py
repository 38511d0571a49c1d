"""The native driver: items that are functions of Kiwi itself. They start no process and open no connection."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import ChangeSpec, Plan, ReadSpec
from kiwi_mcp.drivers import Dispatch, Driver
from kiwi_mcp.memory.files import planned, version_of


class Native(Driver):
    """Calls the verb that a native item names, as the caller of the item."""

    driver = "native"

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan the call of the verb; an item that changes the memory says what it will change."""
        tool, named = chain.tool, (one.tool for one in chain.references)
        spec: ReadSpec | ChangeSpec = ReadSpec(path="", sha256="")
        if tool.manifest.config.get("changes"):
            root = space.memory
            change = planned(root, as_text(tool.manifest.config.get("action")), inputs)
            spec = ChangeSpec(str(root / change.path), version_of(change.before), change.diff(), change.asks_always)
        return Plan(
            identity=tool.identity,
            tool_digest=tool.digest,
            driver=self.driver,
            chain=tuple((link.identity, link.digest) for link in (*chain.links, *named)),
            spec=spec,
            inputs=inputs,
            effect="idempotent" if isinstance(spec, ReadSpec) else "at_most_once",
            change=spec if isinstance(spec, ChangeSpec) else None,
        )

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Check nothing: no process is started."""

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Call the verb; a refusal of it is raised."""
        config = chain.tool.manifest.config
        seen = {"expected_version": plan.spec.version} if isinstance(plan.spec, ChangeSpec) else {}
        request: JsonObject = {"action": as_text(config.get("action")), "arguments": {**plan.inputs, **seen}}
        if config.get("in_project") and space.project_ai.is_dir():
            request = {**request, "project_path": str(space.project)}
        result = {**as_object(await dispatch(as_text(config.get("verb")), request))}
        details: JsonObject = {"is_instructions": True} if result.pop("is_instructions", None) else {}
        return Outcome("success", result=result, details=details)


create_driver = Native
