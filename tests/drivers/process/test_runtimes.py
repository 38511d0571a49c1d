"""The other built-in runtimes, and runtimes that are only data."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from subprocess import run as run_plainly

import pytest
from msgspec.structs import replace
from tests.drivers.process.conftest import Bench

from kiwi_mcp.domain.errors import BuildFailed, CommandMissing, InvalidManifest

RUBY = """
tool_id: ruby_runtime
tool_type: runtime
executor: subprocess
version: "1.0.0"
description: Runs a Ruby file
config:
  command: ruby
  args: ["{tool.files}/{tool.entrypoint}"]
  check: [ruby, -c, "{tool.files}/{tool.entrypoint}"]
  params_as: json_stdin
  result_from: json_stdout
"""
RUST = """
tool_id: rust_runtime
tool_type: runtime
executor: subprocess
version: "1.0.0"
description: Compiles and runs Rust code
config:
  compile_command: rustc
  run_command: ./{binary}
"""
DENO_AS_WRITTEN = """
tool_id: my_deno
tool_type: runtime
executor: subprocess
version: "1.0.0"
config:
  command: deno
  args: ["run", "--allow-all"]
"""
# A compiler of a few lines: it copies its source to the given path, and records that it ran.
COMPILER = """
tool_id: copy_runtime
tool_type: runtime
executor: subprocess
version: "1.0.0"
config:
  compile_command: [bash, "{project}/compile.sh", "{binary}", "{tool.files}/{tool.entrypoint}"]
  params_as: json_stdin
"""
COMPILE_SH = """
echo >> "$KIWI_PROJECT/compiled"
grep -q broken "$2" && { echo "$2: broken" >&2; exit 1; }
cp "$2" "$1"; chmod +x "$1"
"""
PROBES = {
    "python_runtime": ("main.py", "def main(text):\n    return text"),
    "bash_runtime": ("main.sh", 'printf %s "$KIWI_PARAM_text"'),
    "node_runtime": ("main.mjs", "export function main({ text }) { return text; }"),
    "deno_runtime": ("main.ts", "export function main({ text }: { text: string }): string { return text; }"),
}


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-RT-01")
@pytest.mark.parametrize("runtime", PROBES)
def test_each_runtime_that_ships_runs_a_tool(bench: Bench, runtime: str) -> None:
    name, source = PROBES[runtime]
    outcome = bench.run(bench.chain({name: source}, runtime), {"text": "hello"})
    assert (outcome.status, outcome.result) == ("success", "hello")


@pytest.mark.req("K-RT-01")
@pytest.mark.parametrize("runtime", ["bash_runtime", "node_runtime", "deno_runtime"])
def test_a_missing_interpreter_is_an_error_that_names_the_fix(
    bench: Bench, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    name, source = PROBES[runtime]
    below = bench.built_in(runtime)
    nowhere = replace(below.manifest, config={**below.manifest.config, "shell": "/no/such/shell"})
    with pytest.raises(CommandMissing) as missing:
        bench.bind(bench.chain({name: source}, replace(below, manifest=nowhere)), {"text": "x"})
    assert runtime in missing.value.message
    assert "Install" in missing.value.suggestion


@pytest.mark.usefixtures("processes")
def test_bash_is_also_found_where_its_runtime_says(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench.run(bench.chain({"main.sh": "echo here"}, "bash_runtime")).result == "here"


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-RT-01")
def test_python_needs_no_path_since_kiwi_brings_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert (
        bench.run(bench.chain({"main.py": PROBES["python_runtime"][1]}, "python_runtime"), {"text": "x"}).result == "x"
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("main.mjs", "export default async ({ n }) => ({ n: n + 1 });"),
        ("main.mjs", "export async function run({ n }) { console.log('talk'); return { n: n + 1 }; }"),
        ("main.cjs", "module.exports = { main: ({ n }) => ({ n: n + 1 }) };"),
        ("main.cjs", "exports.run = async ({ n }) => ({ n: n + 1 });"),
        ("main.cjs", "module.exports = ({ n }) => ({ n: n + 1 });"),
        (
            "main.mjs",
            "import fs from 'node:fs'; const { n } = JSON.parse(fs.readFileSync(0)); console.log(`{\"n\": ${n + 1}}`);",
        ),
    ],
)
def test_every_form_of_a_node_tool_gets_its_parameters(bench: Bench, name: str, source: str) -> None:
    outcome = bench.run(bench.chain({name: source}, "node_runtime"), {"n": 1})
    assert (outcome.status, outcome.result) == ("success", {"n": 2})


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("runtime", ["python_runtime", "node_runtime", "deno_runtime"])
def test_a_result_of_megabytes_comes_through_whole(bench: Bench, runtime: str) -> None:
    name, source = PROBES[runtime]
    text = "kiwi " * 400_000
    assert bench.run(bench.chain({name: source}, runtime), {"text": text}).result == text


@pytest.mark.usefixtures("processes")
def test_a_node_tool_imports_the_files_beside_it(bench: Bench) -> None:
    files = {
        "main.mjs": "import { twice } from './lib/twice.mjs'; export const main = ({ n }) => twice(n);",
        "lib/twice.mjs": "export const twice = (n) => 2 * n;",
    }
    assert bench.run(bench.chain(files, "node_runtime"), {"n": 4}).result == 8


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("name", "runtime"), [("main.mjs", "node_runtime"), ("main.ts", "deno_runtime")])
@pytest.mark.parametrize(
    "source",
    [
        "export async function main() { throw new TypeError('no luck'); }",
        "throw new TypeError('no luck');",
        "setTimeout(() => { throw new TypeError('no luck'); }, 1);",
    ],
)
def test_an_error_of_a_tool_contains_the_path_of_the_author_file(
    bench: Bench, name: str, runtime: str, source: str
) -> None:
    chain = bench.chain({name: source}, runtime)
    outcome = bench.run(chain)
    assert (outcome.status, outcome.exit_code) == ("error", 1)
    assert outcome.message == "`probe` ended with exit code 1: TypeError: no luck"
    assert f"{chain.tool.origin.root}/{name}:1" in outcome.logs.stderr
    assert "run." not in outcome.logs.stderr


@pytest.mark.usefixtures("processes")
def test_a_syntax_error_of_a_node_tool_contains_its_line(bench: Bench) -> None:
    chain = bench.chain({"main.mjs": "\nlet = = 1;"}, "node_runtime")
    assert f"{chain.tool.origin.root}/main.mjs:2" in bench.run(chain).logs.stderr


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-TY-06")
def test_deno_gets_flags_and_the_path_of_the_file_from_its_data(bench: Bench) -> None:
    source = "console.log(JSON.stringify({ args: Deno.args, input: await new Response(Deno.stdin.readable).json() }));"
    outcome = bench.run(bench.chain({"main.ts": source}, bench.runtime(DENO_AS_WRITTEN)), {"a": "x y", "b": [1]})
    assert outcome.result == {"args": ["--a=x y", "--b=[1]"], "input": {"a": "x y", "b": [1]}}


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
@pytest.mark.req("K-TY-06")
def test_a_ruby_runtime_is_ten_lines_of_data(bench: Bench) -> None:
    source = "require 'json'\nputs({ hello: JSON.parse($stdin.read)['name'] }.to_json)"
    outcome = bench.run(bench.chain({"main.rb": source}, bench.runtime(RUBY)), {"name": "kiwi"})
    assert outcome.result == {"hello": "kiwi"}


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
@pytest.mark.req("K-TY-06")
def test_a_rust_runtime_is_two_keys_of_data(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_real_rustc(monkeypatch)
    source = 'fn main() { println!("{}", std::env::args().nth(1).unwrap()); }'
    chain = bench.chain({"main.rs": source}, bench.runtime(RUST))
    assert bench.run(chain, {"name": "kiwi"}).result == "--name=kiwi"
    assert bench.run(chain, {"name": "again"}).result == "--name=again"

    broken = bench.chain({"main.rs": "fn main() { lost }"}, bench.runtime(RUST), tool_id="broken")
    with pytest.raises(BuildFailed, match="cannot find value `lost`"):
        bench.run(broken)


def _with_real_rustc(monkeypatch: pytest.MonkeyPatch) -> None:
    # A version manager's shim looks for its toolchains below a home that tests do not have.
    rustup = shutil.which("rustup")
    if rustup is None:
        return
    home = str(Path(rustup).parents[2])
    env = {"HOME": home, "PATH": os.environ["PATH"]}
    found = run_plainly([rustup, "which", "rustc"], env=env, capture_output=True, check=True)
    monkeypatch.setenv("PATH", f"{Path(found.stdout.decode().strip()).parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("processes")
def test_a_tool_is_compiled_once(bench: Bench, project: Path) -> None:
    (project / "compile.sh").write_text(COMPILE_SH)
    chain = bench.chain({"main": "#!/bin/sh\necho hello"}, bench.runtime(COMPILER))
    assert [bench.run(chain).result, bench.run(chain).result] == ["hello", "hello"]
    assert (project / "compiled").read_text() == "\n"


@pytest.mark.usefixtures("processes")
def test_a_compile_error_contains_the_compiler_output_and_is_retried(bench: Bench, project: Path) -> None:
    (project / "compile.sh").write_text(COMPILE_SH)
    chain = bench.chain({"main": "broken"}, bench.runtime(COMPILER))
    for _ in range(2):
        with pytest.raises(BuildFailed, match="main: broken"):
            bench.run(chain)
    assert (project / "compiled").read_text() == "\n\n"


def test_a_missing_compiler_is_reported_before_anything_runs(bench: Bench) -> None:
    runtime = bench.runtime(RUST.replace("rustc", "no_such_compiler"))
    with pytest.raises(CommandMissing, match="no_such_compiler"):
        bench.bind(bench.chain({"main.rs": ""}, runtime))


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
def test_a_tool_without_files_is_a_wrapper_around_a_program(bench: Bench) -> None:
    wrapper = bench.runtime(
        'tool_id: echo_runtime\ntool_type: runtime\nversion: "1.0.0"\n'
        "config: {command: printf, args: ['%s|', '{words}', '--last={last}'], params_as: json_stdin}"
    )
    outcome = bench.run(bench.chain({}, wrapper), {"words": ["a b", "$(c)"], "last": "${HOME}"})
    assert outcome.result == "a b|$(c)|--last=${HOME}|"


@pytest.mark.usefixtures("processes")
@pytest.mark.req("G4")
def test_a_wrapped_git_works_and_its_failure_is_an_error_with_both_streams(bench: Bench, project: Path) -> None:
    wrapper = bench.runtime(
        'tool_id: git_runtime\ntool_type: runtime\nversion: "1.0.0"\n'
        "config: {command: git, args: [rev-parse, '{what}'], params_as: json_stdin}"
    )
    run_plainly(["git", "init", "--quiet", str(project)], check=True)
    chain = bench.chain({}, wrapper)
    assert bench.run(chain, {"what": "--is-inside-work-tree"}).result is True
    failed = bench.run(chain, {"what": "nothing_here"})
    assert (failed.status, failed.exit_code) == ("error", 128)
    assert "nothing_here" in failed.logs.stdout
    assert "fatal" in failed.logs.stderr


OLD_PYTHON = """
tool_id: old_python
tool_type: runtime
executor: subprocess
version: "1.0.0"
config:
  command: "${PROJECT_VENV_PYTHON:-python3}"
env_config:
  interpreter: {type: venv_python, var: KIWI_PYTHON}
  env: {GREETING: hello, PROJECT_VENV_PYTHON: "${KIWI_PYTHON}"}
"""


@pytest.mark.usefixtures("processes")
def test_a_legacy_runtime_that_names_its_interpreter_by_a_variable_runs(bench: Bench) -> None:
    source = "import os, sys\nprint(os.environ['GREETING'], sys.argv[1:], os.environ.get('PROJECT_VENV_PYTHON'))"
    outcome = bench.run(bench.chain({"main.py": source}, bench.runtime(OLD_PYTHON)), {"a": 1})
    assert outcome.result == "hello ['--a=1'] None"


def test_a_runtime_without_a_program_is_refused(bench: Bench) -> None:
    runtime = bench.runtime(
        'tool_id: empty_runtime\ntool_type: runtime\nversion: "1.0.0"\nconfig: {url: "https://a.b"}'
    )
    with pytest.raises(InvalidManifest, match="says no program"):
        bench.bind(bench.chain({"a.py": ""}, runtime))


def test_the_data_of_each_runtime_that_ships_is_complete(bench: Bench) -> None:
    for name, (file, source) in PROBES.items():
        assert json.dumps(dict(bench.built_in(name).manifest.config))
        bench.bind(bench.chain({file: source}, name), {"text": ""})
