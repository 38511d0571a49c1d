"""Plans of processes, and what no caller can put into them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import rmtree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.drivers.process.conftest import Bench

from kiwi_mcp.domain.errors import CommandMissing, InvalidArguments, InvalidManifest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.plan import Plan, ProcessSpec

ECHOES = {
    "python_runtime": ("main.py", "def main(**given):\n    return given"),
    "node_runtime": ("main.mjs", "export const main = (given) => given;"),
    "bash_runtime": ("main.sh", "cat"),
}
FLAGS = 'tool_id: flags_runtime\ntool_type: runtime\nversion: "1.0.0"\nconfig: {command: printf, args: ["%s\\\\0"]}'


def spec(plan: Plan) -> ProcessSpec:
    assert isinstance(plan.spec, ProcessSpec)
    return plan.spec


def echo(bench: Bench, runtime: str, inputs: JsonObject) -> Json:
    name, source = ECHOES[runtime]
    outcome = bench.run(bench.chain({name: source}, runtime), inputs)
    assert outcome.status == "success", outcome
    return outcome.result


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-RT-04", "K-RT-06")
@pytest.mark.case("INJ-02", "INJ-10")
@pytest.mark.parametrize("runtime", ECHOES)
def test_every_value_arrives_as_it_was_sent(bench: Bench, runtime: str) -> None:
    inputs: dict[str, Json] = {
        "nothing": None,
        "no": False,
        "zero": 0,
        "empty": "",
        "text": "  \n'\"\\ é 😀 {tool.files} ${HOME} $HOME %s\n\n",
        "flag": "--help",
        "long": "ä" * 10_000,
        "list": [1, {"a": [None]}],
        "PATH": "/nowhere",
        "HOME": "/nowhere",
        "command": "rm",
        "args": ["x"],
        "cwd": "/",
        "env": {"A": "1"},
        "executor": "x",
        "isolation": "none",
        "timeout": 0,
    }
    assert echo(bench, runtime, inputs) == inputs


@pytest.mark.usefixtures("processes")
@pytest.mark.case("INJ-01")
@pytest.mark.parametrize("runtime", ECHOES)
def test_shell_syntax_in_parameters_is_text(bench: Bench, runtime: str, project: Path) -> None:
    hostile = [
        f"; touch {project}/x",
        f"$(touch {project}/x)",
        f"`touch {project}/x`",
        f"\ntouch {project}/x\n",
        "|| x",
    ]
    assert echo(bench, runtime, {"a": hostile, "b": hostile[1]}) == {"a": hostile, "b": hostile[1]}
    assert not (project / "x").exists()


@pytest.mark.usefixtures("processes")
@pytest.mark.case("INJ-01", "INJ-02")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))
def test_bash_gets_each_parameter_exactly_as_a_variable(bench: Bench, value: str) -> None:
    chain = bench.chain({"main.sh": 'printf "%s|" "$KIWI_PARAM_value" | od -An -v -tx1 | tr -d " \\n"'}, "bash_runtime")
    heard = bench.run(chain, {"value": value}).result
    assert f"{value}|".encode().hex() == (heard if isinstance(heard, str) else str(heard))


@pytest.mark.case("INJ-10")
def test_parameters_named_like_execution_settings_change_nothing_in_the_process(bench: Bench) -> None:
    chain = bench.chain({"main.py": "def main(**given): pass"}, "python_runtime")
    plain = spec(bench.bind(chain))
    hostile = spec(bench.bind(chain, {"command": "rm", "args": ["x"], "cwd": "/", "env": {"A": "1"}, "timeout": 1}))
    assert (hostile.argv, hostile.cwd, hostile.env, hostile.timeout) == (
        plain.argv,
        plain.cwd,
        plain.env,
        plain.timeout,
    )


@pytest.mark.usefixtures("processes")
def test_flags_are_one_argument_each(bench: Bench) -> None:
    outcome = bench.run(bench.chain({}, bench.runtime(FLAGS)), {"a": "x y", "b": True, "c": None, "d": {"e": 1}})
    assert outcome.result == '--a=x y\0--b=true\0--c=null\0--d={"e":1}\0'


@pytest.mark.case("INJ-02")
@pytest.mark.parametrize("inputs", [{"a": "x\0y"}, {"a b": 1}, {"a=b": 1}])
def test_flags_refuse_values_that_no_argument_can_contain(bench: Bench, inputs: JsonObject) -> None:
    with pytest.raises(InvalidArguments):
        bench.bind(bench.chain({}, bench.runtime(FLAGS)), inputs)


@pytest.mark.case("INJ-09")
def test_large_parameters_are_never_passed_on_a_command_line(bench: Bench) -> None:
    large = "x" * 200_000
    for runtime in (bench.runtime(FLAGS), bench.built_in("bash_runtime")):
        with pytest.raises(InvalidArguments, match="at most 100,000"):
            bench.bind(bench.chain({"main.sh": ""}, runtime), {"large": large})
    plan = spec(bench.bind(bench.chain({"main.py": ""}, "python_runtime"), {"large": large}))
    assert max(len(word) for word in plan.argv) < 1_000
    assert len(plan.stdin) > 200_000


def test_two_parameters_with_the_same_variable_name_are_refused(bench: Bench) -> None:
    with pytest.raises(InvalidArguments, match="punctuation"):
        bench.bind(bench.chain({"main.sh": ""}, "bash_runtime"), {"dry-run": 1, "dry_run": 2})


@pytest.mark.usefixtures("processes")
def test_a_process_starts_in_the_project_with_few_variables(
    bench: Bench, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "abc")
    outcome = bench.run(bench.chain({"main.sh": "pwd; env | cut -d= -f1 | sort"}, "bash_runtime"), {"a": 1})
    where, *names = str(outcome.result).splitlines()
    assert where == str(project)
    own = {"KIWI_PROJECT", "KIWI_TOOL_ID", "KIWI_PARAM_a", "KIWI_RESULT", "KIWI_RUN"}
    assert set(names) - {"PWD", "SHLVL", "_", "OLDPWD"} <= {"PATH", "HOME", "LANG", "TMPDIR", "USER"} | own


def test_relative_folders_of_the_path_are_left_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f".::bin:{os.environ['PATH']}")
    path = spec(bench.bind(bench.chain({"main.sh": ""}, "bash_runtime"))).env["PATH"]
    assert all(folder.startswith("/") for folder in path.split(":"))


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-RT-06")
def test_a_variable_reaches_a_tool_only_if_declared(bench: Bench) -> None:
    config: JsonObject = {"env": {"TOKEN": "Bearer ${API_KEY}", "NAME": "{name}"}, "variables": ["OTHER_KEY"]}
    source = 'printf "%s %s %s %s" "$TOKEN" "$NAME" "$OTHER_KEY" "$KIWI_PARAM_name"'
    chain = bench.chain({"main.sh": source}, "bash_runtime", config=config)
    plan = bench.bind(chain, {"name": "${API_KEY}"})
    assert plan.variables == ("OTHER_KEY", "API_KEY")
    assert '"Bearer ${API_KEY}"' in json.dumps(plan.to_json())
    outcome = bench.run(chain, {"name": "${API_KEY}"}, secrets={"API_KEY": "1", "OTHER_KEY": "2"})
    assert outcome.result == "Bearer 1 ${API_KEY} 2 ${API_KEY}"


@pytest.mark.case("SEC-08")
def test_a_variable_on_a_command_line_is_refused(bench: Bench) -> None:
    text = (
        'tool_id: loud_runtime\ntool_type: runtime\nversion: "1.0.0"\nconfig: {command: curl, args: ["-u", "${TOKEN}"]}'
    )
    with pytest.raises(InvalidManifest, match="visible to every user"):
        bench.bind(bench.chain({"a.txt": ""}, bench.runtime(text)))


@pytest.mark.case("INJ-11")
@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "NODE_OPTIONS", "BASH_ENV", "PATH", "GIT_SSH_COMMAND"])
def test_a_tool_cannot_set_loader_variables(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidManifest, match=name):
        bench.bind(bench.chain({"main.sh": ""}, "bash_runtime", config={"env": {name: "/tmp/x"}}))


@pytest.mark.case("PATH-04")
@pytest.mark.parametrize("entrypoint", ["gone.sh", "lib", "../main.sh", "/etc/passwd"])
def test_an_entrypoint_outside_the_tool_is_refused(bench: Bench, entrypoint: str) -> None:
    chain = bench.chain({"main.sh": "", "lib/a.sh": ""}, "bash_runtime", config={"entrypoint": entrypoint})
    with pytest.raises(InvalidManifest, match="is not a file of the tool"):
        bench.bind(chain)


def test_a_tool_without_an_entrypoint_is_refused_by_a_runtime_that_needs_one(bench: Bench) -> None:
    with pytest.raises(InvalidManifest, match="does not say which file"):
        bench.bind(bench.chain({}, "python_runtime"))


def test_a_required_command_of_a_tool_is_checked_first(bench: Bench) -> None:
    with pytest.raises(CommandMissing, match="no_such_program"):
        bench.bind(bench.chain({"main.sh": ""}, "bash_runtime", config={"commands": ["cat", "no_such_program"]}))


@pytest.mark.usefixtures("processes")
@pytest.mark.case("SEC-08")
def test_a_secret_is_in_no_command_line_while_its_tool_runs(bench: Bench) -> None:
    source = """
import os
from pathlib import Path

def main():
    secret = os.environ["TOKEN"].encode()
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            pass  # it ended meanwhile
    return {"seen": len(lines) > 1, "found": sum(secret in line for line in lines), "length": len(secret)}
"""
    chain = bench.chain({"main.py": source}, "python_runtime", config={"variables": ["TOKEN"]})
    outcome = bench.run(chain, secrets={"TOKEN": "correct-horse-battery"})
    assert outcome.result == {"seen": True, "found": 0, "length": 21}


@pytest.mark.usefixtures("processes")
@pytest.mark.req("A10")
def test_a_call_behaves_the_same_without_any_cache(bench: Bench, tmp_path: Path) -> None:
    chain = bench.chain({"main.py": "def main(a):\n    return a + 1"}, "python_runtime")
    plan, outcome = bench.bind(chain, {"a": 1}), bench.run(chain, {"a": 1})
    rmtree(tmp_path / "cache")
    assert (bench.bind(chain, {"a": 1}), bench.run(chain, {"a": 1})) == (plan, outcome)


def test_the_same_call_has_the_same_plan_and_writes_nothing(bench: Bench, tmp_path: Path) -> None:
    chain = bench.chain({"main.py": "", "requirements.txt": "httpx>=0.27\n"}, "python_runtime")
    assert bench.bind(chain, {"a": 1}).to_json() == bench.bind(chain, {"a": 1}).to_json()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("written", "seconds"), [({}, 300.0), ({"timeout": 5}, 5.0)])
def test_every_process_has_a_time_limit(bench: Bench, written: JsonObject, seconds: float) -> None:
    assert spec(bench.bind(bench.chain({"main.sh": ""}, "bash_runtime", config=written))).timeout == seconds


@pytest.mark.usefixtures("processes")
def test_an_absent_parameter_omits_its_argument(bench: Bench) -> None:
    text = (
        'tool_id: say_runtime\ntool_type: runtime\nversion: "1.0.0"\n'
        'config: {command: printf, args: ["%s|", "{a}", "{b}"], params_as: json_stdin}'
    )
    chain = bench.chain({}, bench.runtime(text), parameters={"properties": {"a": {}, "b": {}}})
    assert bench.run(chain, {"b": "x"}).result == "x|"
