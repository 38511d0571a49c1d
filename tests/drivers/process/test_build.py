"""Sandboxed builds: a compiler reads the sources, writes its own folder and has no network."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.drivers.process.conftest import Bench

RUNTIME = """
tool_id: copier
tool_type: runtime
executor: subprocess
version: "1.0.0"
description: Compiles by copying
config:
  compile_command: [bash, "{tool.files}/compile.sh", "{binary}", "{tool.files}/{tool.entrypoint}"]
"""
COMPILER = """
set -e
touch "$KIWI_PROJECT/planted" 2>/dev/null && exit 9
touch "$(dirname "$2")/planted" 2>/dev/null && exit 9
(exec 3<>/dev/tcp/127.0.0.1/9) 2>/dev/null && exit 9
ls "$KIWI_PROJECT" >/dev/null 2>&1 && exit 9
cp "$2" "$1"
chmod +x "$1"
"""


@pytest.mark.usefixtures("sandbox")
def test_a_compiler_writes_only_its_own_folder(bench: Bench, project: Path) -> None:
    chain = bench.chain({"main": "#!/bin/sh\necho compiled", "compile.sh": COMPILER}, bench.runtime(RUNTIME))
    tool = replace(chain.tool, manifest=replace(chain.tool.manifest, extra={"isolation": "sandboxed"}))
    outcome = bench.run(replace(chain, links=(tool, *chain.links[1:])))
    assert (outcome.status, str(outcome.result).strip()) == ("success", "compiled"), outcome.message
    assert not [*project.rglob("planted")]
