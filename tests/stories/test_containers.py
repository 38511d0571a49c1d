"""Containers: a tool in an image, what it is given, and what it is refused."""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest
from tests.stories.conftest import House

from kiwi_mcp.domain.json import Json, JsonObject, as_object

BUSYBOX = "/bin/busybox"


def engine(*words: str, data: bytes = b"") -> str:
    done = subprocess.run(["podman", *words], input=data, capture_output=True, check=True, timeout=60)
    return done.stdout.decode().strip()


@pytest.fixture
def image(home: Path, sandbox: None) -> Iterator[str]:
    """An image with busybox alone, made here; the test is skipped where podman cannot run one."""
    if shutil.which("podman") is None or not Path(BUSYBOX).exists():
        pytest.skip("podman or busybox-static is not installed")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(BUSYBOX, "bin/busybox")
    name = f"localhost/kiwi-test:{uuid4().hex}"
    try:
        engine("import", "-", name, data=packed.getvalue())
        engine("run", "--rm", "--network=none", "--memory=64m", "--pids-limit=16", "--ulimit=nofile=64:64",
               "--ulimit=nproc=64:64", name, BUSYBOX, "true")  # fmt: skip
    except subprocess.CalledProcessError as error:
        pytest.skip(f"podman cannot run a container here: {error.stderr.decode(errors='replace')[-200:]}")
    yield name
    engine("rmi", "--force", name)


async def ask(house: House, verb: str, **request: Json) -> JsonObject:
    kernel = house.kernel(is_owner=True)
    try:
        return (await kernel.call(verb, request)).content
    finally:
        await kernel.aclose()


def container(house: House, image: str, script: str, **words: Json) -> None:
    """A tool that runs a shell script in an image."""
    config: JsonObject = {"image": image, "command": [BUSYBOX, "sh", "-c", script, "sh", "{word}"]}
    manifest: JsonObject = {
        "tool_id": "box", "tool_type": "docker", "version": "1.0.0", "description": "Box",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}, **words,
        "config": {**config, **as_object(words.get("config"))},
    }  # fmt: skip
    house.write("tools/box/tool.yaml", manifest)


async def run(house: House, **parameters: Json) -> JsonObject:
    """Sign and relax the tool as its owner, and run it."""
    await house.own("execute", action="sign", item_id="box")
    await house.own("relax", action="apply", item_id="box")
    await house.own("approvals", action="add_rule", item="box")
    return await ask(house, "execute", item_id="box", parameters=parameters)


def left_behind(image: str) -> str:
    return engine("ps", "--all", "--quiet", "--filter", f"ancestor={image}")


@contextmanager
def at_loopback() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with suppress(OSError):  # nobody connected
                server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        yield server.getsockname()[1]


async def test_an_item_that_must_run_more_strictly_is_not_run_in_a_container(house: House, sandbox: None) -> None:
    container(house, "localhost/some:1", "true")
    unsigned = await ask(house, "execute", item_id="box", parameters={})
    await house.own("execute", action="sign", item_id="box")
    signed = await ask(house, "execute", item_id="box", parameters={})
    for answer, level in ((unsigned, "restricted"), (signed, "sandboxed")):
        assert answer["code"] == "isolation_unavailable"
        assert level in str(answer["message"])
        assert "kiwi relax box --to standard" in str(answer["suggestion"])


async def test_without_an_engine_the_error_names_what_to_install(
    house: House, sandbox: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container(house, "localhost/some:1", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = await ask(house, "execute", item_id="box", parameters={})
    assert answer["code"] == "command_not_found"
    assert "apt-get install podman" in str(answer["suggestion"])


@pytest.mark.parametrize(
    "config",
    [
        {"image": "--privileged"},
        {"image": "localhost/some:1", "network": "bridge"},
        {"image": "localhost/some:1", "volumes": [{"source": "data:/etc", "target": "/data"}]},
        {"image": "localhost/some:1", "volumes": [{"source": "data", "target": "/data:rw,exec"}]},
        {"image": "localhost/some:1", "env": {"CONTAINERS_CONF": "mine.conf"}},
        {"image": "localhost/some:1", "build_context": "../outside"},
    ],
)
async def test_options_for_the_engine_cannot_be_smuggled_into_a_manifest(house: House, config: JsonObject) -> None:
    container(house, "", "true", config=config)
    assert (await house.own("execute", action="validate", item_id="box"))["valid"] is False


async def test_a_runtime_that_does_not_ship_with_kiwi_starts_no_engine(house: House, sandbox: None) -> None:
    config: JsonObject = {"command": "podman", "engines": ["podman"], "args": ["run", "--privileged", "{container}"]}
    runtime: JsonObject = {
        "tool_id": "own_engine",
        "tool_type": "runtime",
        "executor": "subprocess",
        "version": "1.0.0",
    }
    house.write("tools/own_engine.yaml", {**runtime, "description": "Mine", "config": config})
    script: JsonObject = {"tool_id": "probe", "tool_type": "script", "executor": "own_engine", "version": "1.0.0"}
    house.write("tools/probe/tool.yaml", {**script, "description": "Probe", "config": {"entrypoint": "main.sh"}})
    house.write("tools/probe/main.sh", "true\n")
    answer = await ask(house, "execute", item_id="probe")
    assert answer["code"] == "invalid_manifest"
    assert "ships with Kiwi" in str(answer["message"])


@pytest.mark.req("K-TY-01")
async def test_the_form_of_the_first_manifests_runs_in_its_image(house: House, image: str) -> None:
    (house.project / "data").mkdir()
    (house.project / "data" / "a").write_text("from the project\n")
    (house.project / "data" / ".env").write_text("TOKEN=secret\n")
    script = (
        "cd /app/data; busybox=/bin/busybox; $busybox cat $KIWI_PARAMETERS; echo; "
        'echo "$1"; $busybox cat a .env; echo made > made; '
        "echo x > /outside || echo 'read-only'; $busybox grep -E 'CapEff|NoNewPrivs' /proc/self/status; "
        "$busybox tail -n +3 /proc/net/dev | $busybox wc -l; $busybox env"
    )
    manifest: JsonObject = {
        "tool_id": "box", "tool_type": "docker", "version": "1.0.0", "description": "Box",
        "executor": {
            "type": "docker", "image": image, "volumes": [{"source": "./data", "target": "/app/data"}],
            "command": [BUSYBOX, "sh", "-c", script, "sh", "{word}"],
        },
        "needs": {"write": ["data"]},
        "parameters": [{"name": "word", "type": "string"}],
    }  # fmt: skip
    house.write("tools/box/tool.yaml", manifest)
    answer = await run(house, word="--privileged")
    assert answer["status"] == "success", answer
    output = str(answer["result"])
    assert output.startswith('{"word":"--privileged"}\n--privileged\nfrom the project\n')
    assert "read-only" in output
    assert "CapEff:\t0000000000000000\nNoNewPrivs:\t1\n1\n" in output  # one interface, which is its own loopback
    assert "secret" not in output
    assert "KIWI_PROJECT" not in output
    assert list((house.root / "cache").glob("kiwi-*.json")) == []  # the parameters
    assert (house.project / "data" / "made").read_text() == "made\n"
    isolation = as_object(answer["isolation"])
    assert (isolation["used"], isolation["backend"]) == ("standard", "podman")
    assert left_behind(image) == ""


@pytest.mark.parametrize(
    ("source", "needs"),
    [("elsewhere", ["data"]), ("link", ["data"]), ("data", []), ("~/.ssh", ["data"]), ("/run", ["data"])],
)
async def test_a_volume_outside_of_the_granted_folders_is_refused(
    house: House, sandbox: None, source: str, needs: list[Json]
) -> None:
    for name in ("data", "elsewhere"):
        (house.project / name).mkdir()
    (house.project / "link").symlink_to(house.project / "data")
    volume: JsonObject = {"source": source, "target": "/data"}
    container(house, "localhost/some:1", "true", config={"volumes": [volume]}, needs={"write": needs})
    answer = await run(house)
    assert answer["code"] == "not_permitted"
    assert "not in a folder that is granted" in str(answer["message"])


async def test_a_volume_that_is_to_be_written_is_not_granted_by_a_need_to_read(house: House, sandbox: None) -> None:
    (house.project / "data").mkdir()
    volume: JsonObject = {"source": "data", "target": "/data"}
    container(house, "localhost/some:1", "true", config={"volumes": [volume]}, needs={"read": ["data"]})
    assert (await run(house))["code"] == "not_permitted"


@pytest.mark.parametrize("source", [".env", "denied", "denied/inner", ".ai", "AGENTS.md", "inner/AGENTS.md", ".git"])
async def test_no_volume_is_what_is_kept_from_the_tool_in_a_granted_folder(
    house: House, sandbox: None, source: str
) -> None:
    for name in ("denied/inner", "inner", ".git", ".ai"):
        (house.project / name).mkdir(parents=True, exist_ok=True)
    for name in (".env", "AGENTS.md", "inner/AGENTS.md"):
        (house.project / name).write_text("kept\n")
    house.settle("policy.yaml", {"files": {"read": {"deny": ["denied"]}}})
    volume: JsonObject = {"source": source, "target": "/data"}
    container(house, "localhost/some:1", "true", config={"volumes": [volume]}, needs={"write": ["."]})
    answer = await run(house)
    assert answer["code"] == "not_permitted", answer


async def test_a_script_is_not_run_by_the_engine(house: House, sandbox: None) -> None:
    config: JsonObject = {"entrypoint": "main.sh", "env": {"CONTAINERS_CONF": str(house.project / "mine.conf")}}
    manifest: JsonObject = {"tool_id": "box", "tool_type": "script", "version": "1.0.0", "description": "Box"}
    house.write("tools/box/tool.yaml", {**manifest, "executor": "container_runtime", "config": config})
    house.write("tools/box/main.sh", "true\n")
    answer = await run(house)
    assert answer["code"] == "invalid_manifest", answer


async def test_the_socket_of_an_engine_is_not_mounted(
    house: House, sandbox: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (house.project / "data").mkdir()
    monkeypatch.chdir(house.project / "data")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("docker.sock")
        for source in ("data", "data/docker.sock"):
            volume: JsonObject = {"source": source, "target": "/data"}
            container(house, "localhost/some:1", "true", config={"volumes": [volume]}, needs={"write": ["data"]})
            answer = await run(house)
            assert "result" not in answer
            assert "socket" in str(answer["message"])


async def test_the_network_of_the_machine_takes_a_grant(house: House, image: str) -> None:
    with at_loopback() as port:
        container(
            house, image, f"{BUSYBOX} nc -w 5 127.0.0.1 {port} && echo reached",
            config={"network": "host"}, needs={"hosts": ["*"]},
        )  # fmt: skip
        refused = await run(house)
        assert refused["code"] == "not_permitted"
        assert "`hosts.allow`" in str(refused["suggestion"])
        house.settle("policy.yaml", {"hosts": {"allow": ["*"]}})
        assert (await run(house))["result"] == "reached"
    container(house, image, "true", config={"network": "host"})
    assert (await run(house))["code"] == "invalid_manifest"
    container(house, image, "true", needs={"hosts": ["example.com"]})
    assert (await run(house))["code"] == "invalid_manifest"


async def test_an_image_that_is_not_here_is_not_fetched(house: House, image: str) -> None:
    container(house, "localhost/kiwi-test-missing:1", "true")
    answer = await run(house)
    assert answer["code"] == "execution_failed"
    assert "podman pull localhost/kiwi-test-missing:1" in str(answer["suggestion"])


async def test_a_container_that_does_not_end_is_removed(house: House, image: str) -> None:
    container(house, image, f"{BUSYBOX} sleep 1000", config={"timeout": 3})
    assert (await run(house))["code"] == "timeout"
    assert left_behind(image) == ""


async def test_a_limit_of_memory_holds_in_a_container(house: House, image: str) -> None:
    container(house, image, f"{BUSYBOX} dd if=/dev/zero of=/dev/null bs=3000000000 count=1")
    assert (await run(house))["code"] == "execution_failed"
    assert left_behind(image) == ""


async def test_an_image_is_built_from_the_files_of_its_tool(house: House, image: str) -> None:
    config: JsonObject = {"build_context": ".", "command": [BUSYBOX, "cat", "/note"]}
    manifest: JsonObject = {"tool_id": "box", "tool_type": "docker", "version": "1.0.0", "description": "Box"}
    house.write("tools/box/tool.yaml", {**manifest, "config": config})
    house.write("tools/box/Containerfile", f"FROM {image}\nCOPY note /note\n")
    house.write("tools/box/note", "first\n")
    assert (await run(house))["result"] == "first"
    house.write("tools/box/note", "second\n")
    assert (await run(house))["result"] == "second"
    house.write("tools/box/Containerfile", f"FROM {image}\nCOPY missing /note\n")
    broken = await run(house)
    assert broken["code"] == "build_failed"
    assert "missing" in str(broken["message"])
    with at_loopback() as port:
        house.write("tools/box/Containerfile", f"FROM localhost:{port}/missing:1\n")
        assert "image not known" in str((await run(house))["message"])
    for built in engine("images", "--quiet", "--filter", "reference=localhost/kiwi/box").split():
        engine("rmi", "--force", built)
