"""Third-party servers in other languages and with other SDK versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.calls import Answers, Questions, Space
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.outcome import Outcome, Progress

SERVERS = Path(sys.prefix) / "mcp-servers"
NPM = SERVERS / "npm" / "node_modules" / ".bin"

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(space: Space, sandbox: None) -> Bench:
    """A bench with sandboxed servers, as in the kernel, that may change the project."""
    return Bench(space, profile=SandboxProfile("sandboxed", writable=(str(space.project),)))


def real(bench: Bench, program: Path, *arguments: str) -> Tool:
    """A server that set-up installed."""
    assert program.exists(), "run `scripts/setup.sh --test`"
    env: JsonObject = {"MEMORY_FILE_PATH": str(bench.space.project / "memory.json")}
    words: dict[str, Json] = {"command": str(program), "args": list(arguments), "env": env, "startup_timeout": 60}
    return bench.server(server_id=program.name, **words)


def installed(name: str) -> Path:
    return SERVERS / name / "bin" / name


def names(bench: Bench, server: Tool) -> set[str]:
    listing = bench.run(bench.list_items(server))
    assert not [issue for issue in listing.issues if issue.is_error]
    return {as_text(tool["name"]) for tool in listing.tools}


def texts(outcome: Outcome) -> str:
    assert outcome.status == "success", outcome.message
    return str(outcome.result)


@pytest.mark.req("K-MC-01", "K-MC-05")
def test_the_everything_server_gives_everything(bench: Bench) -> None:
    server = real(bench, NPM / "mcp-server-everything", "stdio")
    response: list[Progress] = []

    async def scenario() -> None:
        listing = await bench.list_items(server)
        assert len(listing.tools) > 5
        assert listing.prompts
        assert listing.resources or listing.templates
        offered = {as_text(tool["name"]) for tool in listing.tools}
        assert "Echo: hi" in texts(await bench.call(bench.chain(server, "echo"), {"message": "hi"}))
        long = next(name for name in offered if "long" in name.lower())
        steps: JsonObject = {"duration": 1, "steps": 3}
        assert (await bench.call(bench.chain(server, long), steps, report=response.append)).is_success
        prompt = as_text(next(one["name"] for one in listing.prompts if not one.get("arguments")))
        assert (await bench.call(bench.chain(server, "p", mcp_prompt_name=prompt))).is_success
        if listing.resources:
            uri = as_text(listing.resources[0]["uri"])
            assert (await bench.call(bench.chain(server, "r", mcp_resource_uri=uri))).is_success

    bench.run(scenario())
    assert response


@pytest.mark.req("K-MC-01")
def test_the_everything_server_asks_its_caller(bench: Bench) -> None:
    server = real(bench, NPM / "mcp-server-everything", "stdio")
    answers: dict[str, JsonObject] = {
        "elicitation/create": {"action": "accept", "content": {"name": "Ann"}},
        "roots/list": {"roots": [{"uri": "file:///srv/tea", "name": "tea"}]},
        "sampling/createMessage": {"role": "assistant", "content": {"type": "text", "text": "forty-two"}, "model": "m"},
    }

    async def ask(questions: Questions) -> Answers:
        return {key: answers[question.method] for key, question in questions.items()}

    async def scenario() -> list[str]:
        wanted: dict[str, JsonObject] = {
            "trigger-elicitation-request": {},
            "trigger-sampling-request": {"prompt": "How many?", "maxTokens": 10},
            "get-roots-list": {},
        }
        return [texts(await bench.call(bench.chain(server, name), wanted[name], ask=ask)) for name in wanted]

    elicited, sampled, roots = bench.run(scenario())
    assert "Ann" in elicited
    assert "forty-two" in sampled
    assert "file:///srv/tea" in roots


@pytest.mark.req("K-MC-01")
def test_the_filesystem_server_reads_and_refuses(bench: Bench) -> None:
    server = real(bench, NPM / "mcp-server-filesystem", "${ALLOWED_PATH}")
    allowed = bench.space.project
    (allowed / "note.txt").write_text("tea at five")

    async def scenario() -> None:
        secrets = {"ALLOWED_PATH": str(allowed)}
        chain = bench.chain(server, "read_text_file")
        inside = await bench.call(chain, {"path": str(allowed / "note.txt")}, secrets=secrets)
        assert "tea at five" in texts(inside)
        outside = await bench.call(chain, {"path": "/etc/hostname"}, secrets=secrets)
        assert outside.status == "error"
        assert "denied" in outside.message.lower()

    bench.run(scenario())


@pytest.mark.req("K-MC-01")
def test_the_memory_server_remembers_within_a_connection(bench: Bench) -> None:
    server = real(bench, NPM / "mcp-server-memory")

    async def scenario() -> str:
        entity: JsonObject = {"name": "Ann", "entityType": "person", "observations": ["likes tea"]}
        await bench.call(bench.chain(server, "create_entities"), {"entities": [entity]})
        return texts(await bench.call(bench.chain(server, "search_nodes"), {"query": "Ann"}))

    assert "likes tea" in bench.run(scenario())


@pytest.mark.req("K-MC-01")
def test_the_time_server_tells_the_time(bench: Bench) -> None:
    server = real(bench, installed("mcp-server-time"), "--local-timezone", "UTC")

    assert names(bench, server) >= {"get_current_time", "convert_time"}
    assert "UTC" in texts(bench.ask(server, "get_current_time", {"timezone": "UTC"}))


@pytest.mark.req("K-MC-01")
def test_the_git_server_reads_a_repository(bench: Bench) -> None:
    project = bench.space.project
    subprocess.run(["git", "init", "-q", str(project)], check=True, timeout=120)
    server = real(bench, installed("mcp-server-git"), "--repository", str(project))

    assert "git_status" in names(bench, server)
    assert "branch" in texts(bench.ask(server, "git_status", {"repo_path": str(project)}))


@pytest.mark.req("K-MC-01")
def test_a_server_with_an_older_sdk_works(bench: Bench) -> None:
    server = real(bench, installed("mcp-server-calculator"))

    assert names(bench, server) == {"calculate"}
    assert "42" in texts(bench.ask(server, "calculate", {"expression": "6 * 7"}))


@pytest.mark.req("K-MC-01")
def test_a_server_of_another_author_lists_its_tools(bench: Bench) -> None:
    assert "search" in names(bench, real(bench, installed("duckduckgo-mcp-server")))
