"""Sandboxed servers: what the process sees, changes and reaches, and which grant its errors suggest."""

from __future__ import annotations

import pathlib
import socket
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.drivers.mcp.conftest import Bench
from tests.plugins.http_server import HttpReply, http_server

from kiwi_mcp.domain.isolation import ResourceLimits, SandboxProfile
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, as_list, as_object
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.mcp.server import server_of
from kiwi_mcp.sandbox.command_files import files_of_command

PROBE = """
import json, os, socket, sys, urllib.request
import beside

def tried(work):
    try:
        return str(work())
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"

def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "probe", "version": "1"}}
    if method == "tools/list":
        return {"tools": [{"name": "probe", "inputSchema": {"type": "object"}}]}
    arguments = params.get("arguments", {})
    match arguments.get("do"):
        case "read":
            said = tried(lambda: open(arguments["path"]).read())
        case "write":
            said = tried(lambda: open(arguments["path"], "w").write("x"))
        case "connect":
            said = tried(lambda: socket.create_connection(("127.0.0.1", arguments["port"]), 2))
        case "fetch":
            said = tried(lambda: urllib.request.urlopen(arguments["url"], timeout=120).read().decode())
        case "fill":
            with open(arguments["path"], "wb") as file:
                file.write(os.urandom(arguments["size"]))
                os.fsync(file.fileno())
            said = tried(sys.stdin.read)
        case "fail":
            return {"content": [{"type": "text", "text": arguments["text"]}], "isError": True}
        case _:
            said = beside.WORD + " " + str(os.getpid())
    return {"content": [{"type": "text", "text": said}]}

for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = {"result": answer(message["method"], message.get("params", {}))}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **result}), flush=True)
"""


@pytest.fixture
def held(bench: Bench) -> Bench:
    return replace(bench, profile=SandboxProfile("sandboxed"))


@pytest.fixture
def folder(bench: Bench) -> Path:
    """The folder of a server: its script, and a module beside it."""
    folder = bench.space.project / "servers"
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "beside.py").write_text("WORD = 'here'")
    return folder


def server(bench: Bench, *arguments: str, **config: Json) -> Tool:
    return bench.server(server_id="probe", command=sys.executable, args=[*arguments], env={}, **config)


def said(outcome: Outcome) -> str:
    assert outcome.status == "success", outcome.message
    return str(outcome.result)


def do(bench: Bench, tool: Tool, **inputs: Json) -> Outcome:
    return bench.ask(tool, "probe", inputs)


@pytest.mark.usefixtures("sandbox")
def test_a_server_sees_the_folder_of_its_script_and_not_the_rest_of_the_project(held: Bench, folder: Path) -> None:
    (held.space.project / "diary.txt").write_text("secret")
    probe = server(held, "servers/probe.py")
    assert said(do(held, probe)).startswith("here ")
    assert "No such file" in said(do(held, probe, do="read", path=str(held.space.project / "diary.txt")))
    assert "Read-only file system" in said(do(held, probe, do="write", path=str(folder / "new.txt")))
    assert not (folder / "new.txt").exists()


@pytest.mark.usefixtures("sandbox")
def test_a_server_reaches_no_network_and_no_file_of_the_owner(held: Bench, folder: Path, home: Path) -> None:
    (home / "keys").write_text("secret")
    (folder / ".env").write_text("TOKEN=1")
    probe = server(held, str(folder / "probe.py"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reached = said(do(held, probe, do="connect", port=listener.getsockname()[1]))
    assert "Error" in reached
    assert "No such file" in said(do(held, probe, do="read", path=str(home / "keys")))
    assert "TOKEN" not in said(do(held, probe, do="read", path=str(folder / ".env")))


@pytest.mark.usefixtures("sandbox")
def test_what_kiwi_installed_for_a_server_is_readable_in_a_folder_that_hides_the_rest(
    held: Bench, folder: Path, tmp_path: Path
) -> None:
    package, other = held.space.cache / "envs" / "one", held.space.cache / "other"
    package.parent.mkdir(parents=True)
    folder.rename(package)
    other.write_text("secret")
    profile = SandboxProfile(
        "sandboxed", readable=(str(package),), writable=(str(tmp_path),), hidden=(str(held.space.cache),)
    )
    wide, probe = replace(held, profile=profile), server(held, str(package / "probe.py"))
    assert said(do(wide, probe)).startswith("here ")
    assert "No such file" in said(do(wide, probe, do="read", path=str(other)))
    assert "Read-only" in said(do(wide, probe, do="write", path=str(package / "new")))
    assert said(do(wide, probe, do="write", path=str(tmp_path / "new"))) == "1"


@pytest.mark.usefixtures("sandbox")
def test_a_server_has_what_its_sandbox_grants(held: Bench, folder: Path) -> None:
    data = held.space.project / "data"
    data.mkdir()
    given = replace(held, profile=SandboxProfile("sandboxed", writable=(str(data),)))
    assert said(do(given, server(held, "servers/probe.py"), do="write", path=str(data / "new.txt"))) == "1"
    assert (data / "new.txt").read_text() == "x"


@pytest.mark.usefixtures("sandbox")
def test_a_folder_that_a_manifest_names_is_visible(held: Bench, folder: Path) -> None:
    work = held.space.project / "work"
    work.mkdir()
    (work / "note.txt").write_text("tea")
    assert said(do(held, server(held, str(folder / "probe.py"), cwd="work"), do="read", path="note.txt")) == "tea"


@pytest.mark.usefixtures("sandbox")
def test_another_sandbox_is_another_process(held: Bench, folder: Path) -> None:
    other = replace(held, profile=SandboxProfile("sandboxed", readable=(str(held.space.project),)), driver=held.driver)
    chain = held.chain(server(held, str(folder / "probe.py")), "probe")

    async def scenario() -> list[int]:
        for bench in (held, held, other):
            await bench.call(chain)
        return [held.driver._pool().open_count]

    assert held.run(scenario()) == [2]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ENOENT: no such file or directory, open '{path}'", "--read {path}"),
        ("[Errno 30] Read-only file system: '{path}/new.db'", "--write {path}"),
        ("ENOENT: no such file or directory, open '{path}/missing.txt'", "--write {path}"),
        (f"File \"{pathlib.__file__}\", line 1 in open: No such file or directory: '{{path}}'", "--read {path}"),
        (f'File "{pathlib.__file__}", line 1 in open: No such file or directory', ""),
        ("request to https://api.example.test/v1 failed: getaddrinfo ENOTFOUND", "--host api.example.test"),
        ("EROFS: read-only file system, open '{path}/memory.json.7c25.tmp'", "--write {path}"),
        ("fatal: Unable to create '{path}/.git/index.lock': Read-only file system", "--write {path}"),
        ("EACCES: permission denied, mkdir '{path}/new'", "--write {path}"),
        (
            "connect ENETUNREACH 140.82.121.6:443 - Local (0.0.0.0:0) https://api.example.test",
            "--host api.example.test",
        ),
        ("Failed to fetch robots.txt https://tea.test/robots.txt due to a connection issue", "--host tea.test"),
        ("fetch failed", "--host HOST"),
        ("Access denied - path outside allowed directories: /etc/passwd not in {path}", ""),
        ("that is not a number", ""),
    ],
)
def test_a_failure_caused_by_a_missing_grant_contains_the_command_to_type(
    held: Bench, folder: Path, text: str, wanted: str
) -> None:
    path = held.space.project / "data"
    path.mkdir()
    outcome = do(held, server(held, str(folder / "probe.py")), do="fail", text=text.format(path=path))
    assert outcome.status == "error"
    command = f"`kiwi mcp allow probe {wanted.format(path=path)}`" if wanted else "kiwi mcp allow"
    assert (command in outcome.suggestion) is bool(wanted)


@pytest.mark.usefixtures("sandbox")
def test_an_existing_grant_is_not_suggested_again(held: Bench, folder: Path) -> None:
    data = held.space.project / "data"
    data.mkdir()
    given = replace(held, profile=SandboxProfile("sandboxed", writable=(str(data),)))
    text = f"no such file or directory: '{data}/missing.txt', '{data}'"
    outcome = do(given, server(held, str(folder / "probe.py")), do="fail", text=text)
    assert outcome.status == "error"
    assert "kiwi mcp allow" not in outcome.suggestion


@pytest.mark.usefixtures("sandbox")
def test_a_server_that_cannot_start_in_its_sandbox_reports_what_it_lacks(held: Bench, folder: Path) -> None:
    module = held.space.project / "elsewhere.py"
    module.write_text("")
    (folder / "probe.py").write_text(f"open({str(module)!r})")
    outcome = do(held, server(held, str(folder / "probe.py")))
    assert outcome.status == "unavailable"
    assert f"`kiwi mcp allow probe --read {module}`" in outcome.suggestion


@pytest.mark.usefixtures("sandbox")
def test_a_failing_launcher_is_not_reported_as_the_server(held: Bench, folder: Path) -> None:
    gone = replace(held, profile=SandboxProfile("sandboxed", readable=(str(held.space.project / "gone"),)))
    outcome = do(gone, server(held, str(folder / "probe.py")))
    assert outcome.status == "unavailable"
    assert "gone" in outcome.message


def test_a_server_without_a_sandbox_profile_runs_in_the_strictest_sandbox(held: Bench, folder: Path) -> None:
    assert server_of(server(held, str(folder / "probe.py")), held.space).profile.level == "restricted"


def test_a_script_in_the_home_folder_does_not_expose_the_home_folder(bench: Bench, home: Path) -> None:
    (home / "server.py").write_text("")
    seen = files_of_command(ProcessSpec((sys.executable, str(home / "server.py")), cwd="/", env={}), has_folder=False)
    assert str(home) not in seen.readable
    assert str(home / "server.py") in seen.readable


@pytest.mark.parametrize(
    "words",
    [["python3", "-c"], ["python3", "-Ic"], ["python3", "-m"], ["node", "-e"], ["node", "--eval=1"], ["node", "-pe"],
     ["sh", "-ec"], ["perl", "-E"], ["php", "-r"], ["python3", "-cpass"]],
)  # fmt: skip
def test_an_argument_after_inline_code_is_not_a_script(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "secrets.key").write_text("")
    command = (*words, "code", str(tmp_path / "secrets.key"))
    assert files_of_command(ProcessSpec(command, cwd="/", env={}), has_folder=False).readable == ()


def test_a_package_is_visible_in_full(tmp_path: Path) -> None:
    modules = tmp_path / "app" / "node_modules"
    script = modules / "server" / "dist" / "index.js"
    package = tmp_path / "src" / "pkg" / "inner"
    for folder in (script.parent, package):
        folder.mkdir(parents=True)
    for file in (script, package / "__init__.py", package.parent / "__init__.py", package / "main.py"):
        file.write_text("")

    def readable(program: str, path: Path) -> tuple[str, ...]:
        return files_of_command(ProcessSpec((program, str(path)), cwd="/", env={}), has_folder=False).readable

    assert readable("/usr/bin/node", script) == (str(modules),)
    assert readable("/usr/bin/python3", package / "main.py") == (str(tmp_path / "src"),)


@pytest.mark.usefixtures("sandbox")
def test_a_server_reaches_its_granted_hosts_and_reports_the_others(held: Bench, folder: Path) -> None:
    with http_server(lambda _: HttpReply(b"tea")) as host:
        port = int(host.rpartition(":")[2])
        given = replace(held, profile=SandboxProfile("sandboxed", hosts=(host,), private_hosts=(host,)))
        probe = server(held, str(folder / "probe.py"))
        response = do(given, probe, do="fetch", url=f"http://{host}/")
        assert said(response) == "tea"
        (row,) = map(as_object, as_list(response.sent["hosts"]))
        assert (row["host"], row["port"], row["verdict"]) == ("127.0.0.1", port, "allowed")

        async def scenario() -> Outcome:
            chain = given.chain(probe, "probe")
            await given.call(chain, {"do": "fetch", "url": "http://other.test/"})
            return await given.call(chain, {"do": "fail", "text": "fetch failed"})

        assert "--host other.test`" in given.run(scenario()).suggestion


@pytest.mark.usefixtures("sandbox")
@pytest.mark.timeout(240)  # a disk may take its time with what is written through to it
def test_a_server_that_exceeds_its_quota_is_stopped_with_a_reason(held: Bench, folder: Path) -> None:
    given = held.space.project / "given"
    given.mkdir()
    profile = SandboxProfile("sandboxed", writable=(str(given),), limits=ResourceLimits(workspace_bytes=4_000_000))
    filled = do(
        replace(held, profile=profile), server(held, str(folder / "probe.py")),
        do="fill", path=str(given / "much"), size=8_000_000,
    )  # fmt: skip
    assert filled.status != "success"
    assert "wrote more than 4,000,000 bytes" in filled.message


@pytest.mark.usefixtures("sandbox")
def test_sandboxed_servers_leave_no_process_and_no_descriptor(held: Bench, folder: Path) -> None:
    def left() -> tuple[int, int]:
        children = [
            pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
        ]
        return len(children), len([*Path("/proc/self/fd").iterdir()])

    probe = server(held, str(folder / "probe.py"))

    def some(times: int) -> tuple[int, int]:
        for _ in range(times):
            assert said(do(held, probe)).startswith("here ")
        return left()

    assert some(3) == some(9)
