"""Syntax checks by the command of each runtime."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.drivers.process.conftest import Bench

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.drivers import SyntaxCheck
from kiwi_mcp.drivers.process import Process

RUBY = """
tool_id: ruby_runtime
tool_type: runtime
version: "1.0.0"
config: {command: ruby, check: [ruby, -c, "{tool.files}/{tool.entrypoint}"]}
"""
BROKEN = {
    "main.py": ("python_runtime", "x = 1\ny = 2\ndef main(:\n    pass\n", "x = 1\n"),
    "main.sh": ("bash_runtime", "echo 1\necho 2\nif )\n", "echo 1\n"),
    "main.mjs": ("node_runtime", "let a = 1;\nlet b = 2;\nlet = = 3;\n", "let a = 1;\n"),
    "main.ts": ("deno_runtime", "const a = 1;\nconst b = 2;\nconst = ;\n", "const a: number = 1;\n"),
}


def check(bench: Bench, name: str, source: str, runtime: str | Tool) -> tuple[Issue, ...]:
    chain = bench.chain({name: source}, runtime)
    found = Process().check(chain, bench.space)
    return asyncio.run(_issues(found)) if found else ()


async def _issues(found: SyntaxCheck) -> tuple[Issue, ...]:
    return await found.run()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-VA-03")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_issue_with_its_line(bench: Bench, name: str) -> None:
    runtime, broken, _ = BROKEN[name]
    (issue,) = check(bench, name, broken, runtime)
    assert (issue.place, issue.line, issue.severity) == (f"{name}:3", 3, "error")
    assert "error" in issue.reason.lower()
    assert "cache" not in issue.reason


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-VA-03")
@pytest.mark.parametrize("name", BROKEN)
def test_a_good_file_has_no_issue(bench: Bench, name: str) -> None:
    runtime, _, good = BROKEN[name]
    assert check(bench, name, good, runtime) == ()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.slow
@pytest.mark.req("K-VA-03")
def test_ruby_is_checked_by_the_command_of_its_runtime(bench: Bench) -> None:
    (issue,) = check(bench, "main.rb", "x = 1\ny = 2\ndef ) \n", bench.runtime(RUBY))
    assert issue.line == 3


@pytest.mark.usefixtures("sandbox")
def test_a_check_runs_nothing_of_the_file(bench: Bench, project: Path) -> None:
    source = f"open({str(project / 'x')!r}, 'w')"
    assert check(bench, "main.py", source, "python_runtime") == ()
    assert not (project / "x").exists()


def test_an_entrypoint_that_is_missing_is_an_issue(bench: Bench) -> None:
    chain = bench.chain({"main.py": ""}, "python_runtime")
    with pytest.raises(InvalidManifest) as refused:
        Process().check(replace(chain, links=(replace(chain.tool, files=()), *chain.links[1:])), bench.space)
    (issue,) = refused.value.issues
    assert issue.place == "config.entrypoint"


def test_a_runtime_without_a_check_command_reports_nothing(bench: Bench) -> None:
    silent = bench.runtime('tool_id: any_runtime\ntool_type: runtime\nversion: "1.0.0"\nconfig: {command: cat}')
    assert check(bench, "main.x", ")(", silent) == ()
