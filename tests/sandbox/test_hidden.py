"""Hidden parts of a granted folder are empty inside, for reading and writing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import as_text
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
TOOL = """#!/bin/bash
# tool_id: peek
# tool_type: script
# executor: bash_runtime
# version: 1.0.0
# description: Look around
# isolation: sandboxed
# needs: {{read: [docs], write: [out]}}
cd "{project}"
cat docs/open.md
cat docs/.env docs/secret/key docs/notes.pem 2>/dev/null
ls docs/secret 2>/dev/null
echo changed > out/kept.txt 2>/dev/null && echo wrote-kept
echo new > out/new.txt && echo wrote-new
cat out/kept.txt
true
"""


@pytest.mark.usefixtures("sandbox")
def test_a_sandboxed_process_sees_its_grants_and_nothing_that_a_rule_denies(
    ask: Ask, project: Path, home: Path
) -> None:
    for name in ("docs/open.md", "docs/.env", "docs/secret/key", "docs/notes.pem", "out/kept.txt"):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"words of {path.name}\n")
    tools = project / ".ai" / "tools"
    tools.mkdir()
    (tools / "peek.sh").write_text(TOOL.format(project=project))
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(
        "files: {read: {deny: [docs/secret, '**/*.pem']}, write: {deny: [out/kept.txt]}}\n"
    )
    ask("execute", action="sign", item_id="peek")

    said = as_text(ask("execute", item_id="peek").content["result"])
    assert "words of open.md" in said
    assert "wrote-new" in said
    for kept in ("words of .env", "words of key", "words of notes.pem", "wrote-kept"):
        assert kept not in said
    assert (project / "out" / "kept.txt").read_text() == "words of kept.txt\n"
    assert (project / "out" / "new.txt").exists()
