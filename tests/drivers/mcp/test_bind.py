"""Plans of calls to a server, made before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.errors import CommandMissing, InvalidArguments, InvalidManifest
from kiwi_mcp.domain.plan import HttpSpec, ProcessSpec
from kiwi_mcp.drivers.mcp.server import server_of


def test_a_plan_contains_the_transport_and_the_request(bench: Bench) -> None:
    server = bench.server("x", env={"KEY": "${API_KEY}", "MODE": "${MODE:-fast}"})
    plan = bench.driver.bind(bench.chain(server, "echo", timeout=7), {"text": "hi"}, bench.space)

    assert isinstance(plan.spec, ProcessSpec)
    assert plan.spec.argv[0] == sys.executable
    assert plan.spec.env["KEY"] == "${API_KEY}"
    assert plan.spec.env["KIWI_TOOL_ID"] == "hostile"
    assert "OTHER" not in plan.spec.env
    assert plan.spec.timeout == 7
    assert plan.facts == {"mcp": {"method": "tools/call", "name": "echo", "transport": "stdio"}}
    assert plan.inputs == {"text": "hi"}
    assert (plan.variables, plan.defaulted) == (("API_KEY", "MODE"), ("MODE",))
    assert plan.effect == "at_most_once"
    assert bench.notes == []


def test_a_variable_in_a_command_line_works_with_a_warning(bench: Bench) -> None:
    server = bench.server(args=["server.py", "${ALLOWED_PATH}"])
    plan = bench.driver.bind(bench.chain(server, "echo"), {}, bench.space)

    assert plan.variables == ("ALLOWED_PATH",)
    assert "ALLOWED_PATH" in plan.warnings[0]


def test_a_url_contains_its_credentials_by_name(bench: Bench) -> None:
    auth = {"type": "bearer", "token": "${TOKEN}"}
    server = bench.remote("https://tools.example.com/mcp", headers={"X-Team": "blue"}, auth=auth)
    plan = bench.driver.bind(bench.chain(server, "find"), {}, bench.space)

    assert isinstance(plan.spec, HttpSpec)
    assert plan.spec.headers == {"X-Team": "blue", "Authorization": "Bearer ${TOKEN}"}
    assert plan.variables == ("TOKEN",)
    assert plan.facts["mcp"] == {"method": "tools/call", "name": "find", "transport": "http"}


def test_limits_have_finite_defaults(bench: Bench) -> None:
    bare = bench.server(startup_timeout=None, timeout=None)
    server = server_of(bare, bench.space)

    assert (server.spec.timeout, server.startup_timeout, server.max_bytes) == (60, 30, 16_000_000)


@pytest.mark.parametrize(
    ("template", "inputs", "uri"),
    [
        ("memo://one", {}, "memo://one"),
        ("memo://{name}", {"name": "a/b c"}, "memo://a%2Fb%20c"),
        ("file:///{+path}", {"path": "a/b c"}, "file:///a/b%20c"),
    ],
)
def test_the_uri_of_a_resource_is_built_from_parameters(
    bench: Bench, template: str, inputs: dict[str, str], uri: str
) -> None:
    plan = bench.driver.bind(bench.chain(bench.server(), "r", mcp_resource_uri=template), inputs, bench.space)

    assert plan.facts["mcp"] == {"method": "resources/read", "name": uri, "transport": "stdio"}
    assert plan.effect == "idempotent"


def test_a_resource_without_a_parameter_of_its_uri_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidArguments):
        bench.driver.bind(bench.chain(bench.server(), "r", mcp_resource_uri="memo://{name}"), {}, bench.space)


def test_a_missing_command_is_reported_before_anything_runs(bench: Bench) -> None:
    with pytest.raises(CommandMissing):
        bench.driver.bind(bench.chain(bench.server(command="no-such-runner"), "echo"), {}, bench.space)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PATH"])
def test_variables_that_loaders_obey_are_refused(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidManifest):
        bench.driver.bind(bench.chain(bench.server(env={name: "x"}), "echo"), {}, bench.space)


@pytest.mark.usefixtures("processes")
@pytest.mark.case("INJ-13")
def test_names_and_arguments_with_control_characters_are_data(bench: Bench) -> None:
    outcome = bench.ask(bench.server(), "echo", {"text": 'a\n{"jsonrpc":"2.0"}\r\n\x00\x1b[0m'})

    assert outcome.result == 'a\n{"jsonrpc":"2.0"}\r\n\x00\x1b[0m'


@pytest.mark.usefixtures("processes")
def test_the_kernel_starts_without_the_sdk() -> None:
    program = "import sys, kiwi_mcp.kernel; print(sorted({'mcp', 'httpx2', 'websockets'} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert shown.stdout.strip() == "[]"
