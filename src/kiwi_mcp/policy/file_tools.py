"""File tools: a path that is not plain or is reserved is refused, and the change of a call is part of its plan."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import PolicyDenied, ReservedPath
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import as_text, compact
from kiwi_mcp.domain.plan import ChangeSpec, Plan, ProcessSpec
from kiwi_mcp.memory.files import change_of, plain_parts, version_of
from kiwi_mcp.sandbox.levels import base_profile

_CHANGES = frozenset({"write", "edit", "delete"})
_ORDINARY = frozenset({".dockerignore", ".editorconfig", ".gitignore"})
"""Names with a dot in front that a tool may change: they start no program."""


def with_file(plan: Plan, chain: Chain, space: Space) -> Plan:
    """Return the plan of a file tool with the one change that it makes, if any; other plans stay as they are."""
    tool = chain.tool
    # Only built-in code is known to make no other change than the one shown.
    if not tool.origin.is_built_in or not (action := as_text(tool.manifest.config.get("file"))):
        return plan
    path, is_change = as_text(plan.inputs.get("path")), action in _CHANGES
    for part in plain_parts(path):
        if (part.startswith(".") and part not in _ORDINARY) or (is_change and base_profile().is_protected(part)):
            raise ReservedPath(path)
    if not is_change or not isinstance(plan.spec, ProcessSpec):
        return plan
    root = Path(os.path.realpath(space.project))
    if plan.profile and any((root / path).is_relative_to(hidden) for hidden in plan.profile.hidden):
        raise PolicyDenied(f"A rule of the owner denies {path!r}.", suggestion="Choose another path.")
    change = change_of(root, action, plan.inputs, tool.id)
    shown = ChangeSpec(str(root / path), version_of(change.before), change.diff())
    # The process ends without a change if the file is no longer the version that was approved.
    given = {**plan.inputs, "expected_version": shown.version}
    spec = replace(plan.spec, stdin=compact(given).encode())
    facts = {**plan.facts, "change": {"path": shown.path, "version": shown.version, "diff": shown.diff}}
    return replace(plan, spec=spec, facts=facts, change=shown)
