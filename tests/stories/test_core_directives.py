"""The directives that ship with Kiwi: a fresh home has them, and they are valid."""

from __future__ import annotations

import pytest
from tests.plugins.machines import MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_object

CORE: dict[str, JsonObject] = {
    "chat": {"message": "Hello"},
    "summarize": {"text": "A long talk about {input:focus}.", "focus": "kiwis"},
    "git_checkpoint": {"operation": "write_note", "caller_directive": "notes"},
    "migrate_script_to_tool": {"script": "old.py"},
}


@pytest.mark.parametrize("name", CORE)
def test_a_fresh_home_has_the_core_directives(a_machine: MakeMachine, name: str) -> None:
    machine = a_machine("ann")

    checked = machine.ask("execute", action="validate", item_id=name, item_type="directive").content
    answer = machine.do("run", name, CORE[name], item_type="directive")
    program = as_object(answer["result"])

    assert (checked["status"], checked.get("warnings", [])) == ("valid", [])
    assert (answer["status"], answer["identity"]) == ("ready", f"builtin/kiwi/{name}@1.0.0")
    assert all(str(value) in str(program["text"]) for value in CORE[name].values())
    assert "{input:" not in str(program["text"]).replace("{input:focus}", "")
