"""The lockfile: it records the chain of a signed tool and reports changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import kiwi_mcp
from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.lockfile import NAME, Lock, SignedBy, forget_signer, record
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.items import Chain

Put = Callable[..., Path]

RUNTIME = """\
tool_id: my_runtime
tool_type: runtime
version: {version}
executor: subprocess
config: {{command: {command}}}
"""
LESS = ("verified", "integrity", "unsigned", "unknown_key", "revoked")
SCRIPT = "tool_id: x\ntool_type: script\nversion: 1.0.0\nexecutor: my_runtime@^1\nconfig: {entrypoint: main.py}\n"


@pytest.fixture
def chain(catalog: Catalog, put: Put) -> Chain:
    put("tools/my_runtime.yaml", RUNTIME.format(version="1.0.0", command="bash"))
    put("tools/x/tool.yaml", SCRIPT)
    put("tools/x/main.py", "x = 1\n")
    return catalog.resolve("x")


@pytest.fixture
def path(space: Space) -> Path:
    return space.project_ai / NAME


@pytest.mark.req("K-CH-04")
def test_an_edited_runtime_is_reported_with_both_versions_and_digests(
    catalog: Catalog, put: Put, chain: Chain, path: Path
) -> None:
    record(path, chain, None)
    assert Lock.read(path).is_recorded(chain)
    assert Lock.read(path).changes(chain) == ()

    put("tools/my_runtime.yaml", RUNTIME.format(version="1.1.0", command="sh"))
    now = catalog.resolve("x")

    old, new = chain.links[1].digest[:12], now.links[1].digest[:12]
    assert Lock.read(path).changes(now) == (f"my_runtime changed: 1.0.0 sha256:{old}… → 1.1.0 sha256:{new}…",)

    record(path, now, None)
    assert Lock.read(path).changes(now) == ()


def test_another_chain_and_another_source_are_reported(catalog: Catalog, put: Put, chain: Chain, path: Path) -> None:
    record(path, chain, None)
    put("tools/x/tool.yaml", SCRIPT.replace("my_runtime@^1", "bash_runtime"))
    changes = Lock.read(path).changes(catalog.resolve("x"))
    assert changes[0] == "the chain was x → my_runtime → subprocess and is now x → bash_runtime → subprocess"
    assert changes[1].startswith("x changed: ")

    moved = replace(chain.links[1], origin=replace(chain.links[1].origin, source="user"))
    elsewhere = replace(chain, links=(chain.links[0], moved, chain.links[2]))
    assert Lock.read(path).changes(elsewhere) == ("my_runtime came from project and now comes from user",)


def test_an_item_that_was_never_recorded_has_no_changes(chain: Chain, path: Path) -> None:
    lock = Lock.read(path)

    assert not lock.is_recorded(chain)
    assert lock.changes(chain) == ()


def test_the_signer_is_recorded_and_a_weaker_signature_is_reported(chain: Chain, path: Path) -> None:
    tool = replace(chain.tool, trust="owner", signer="f1")
    record(path, chain, SignedBy.of(tool))
    lock = Lock.read(path)

    assert lock.signer(tool) == SignedBy("owner", "f1")
    edited = replace(tool, digest="0" * 64)
    # The same bytes with the same signature, with any trust in its key, or another signature of the owner.
    kept = (tool, replace(tool, trust="unknown_key"), replace(tool, trust="revoked"), replace(edited, signer="f2"))
    assert [lock.lost_signature(one) for one in kept] == [None] * 4
    lost = [replace(tool, trust="integrity", signer=""), *(replace(edited, trust=trust) for trust in LESS)]
    assert [str(lock.lost_signature(one)) for one in lost] == ["the owner (f1)"] * len(lost)

    forget_signer(path, tool)
    assert Lock.read(path).lost_signature(edited) is None
    assert Lock.read(path).is_recorded(chain)


def test_the_lockfile_is_sorted_stable_and_contains_the_whole_chain(chain: Chain, path: Path) -> None:
    record(path, chain, None)
    text = path.read_text()
    record(path, chain, None)

    assert path.read_text() == text
    held = json.loads(text)
    assert text == json.dumps(held, indent=2, sort_keys=True) + "\n"
    row = held["tools"]["project/local/x"]
    assert (row["version"], row["digest"]) == ("1.0.0", chain.tool.digest)
    assert [(link["tool_id"], link["source"]) for link in row["chain"]] == [
        ("x", "project"),
        ("my_runtime", "project"),
        ("subprocess", "builtin"),
    ]
    assert [file.name for file in path.parent.iterdir() if "lock" in file.name] == [NAME]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"lockfile": "kiwi.lock/2", "tools": {}}',
        '{"lockfile": "kiwi.lock/1", "tools": {"a": 1}}',
        '{"lockfile": "kiwi.lock/1", "tools": {"a": {"chain": [{"tool_id": 3}]}}}',
        '{"lockfile": "kiwi.lock/1", "tools": {"a": {"chain": [{"tool_id": "a", "digest": "d"}], "signed_by": {}}}}',
        "[" * 5_000,
        "\ufffe\0",
    ],
)
def test_a_damaged_lockfile_is_refused_and_not_changed(chain: Chain, path: Path, text: str) -> None:
    path.write_text(text)

    with pytest.raises(InvalidManifest):
        Lock.read(path)
    with pytest.raises(InvalidManifest):
        record(path, chain, None)
    assert path.read_text() == text


WRITER = """
import sys
from msgspec.structs import replace
from pathlib import Path
from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.lockfile import record
from kiwi_mcp.domain.calls import Space

project, home, cache, number = sys.argv[1:]
chain = Catalog(Space(Path(project), Path(home), Path(cache))).resolve("x")
sys.stdin.readline()
for count in range(10):
    named = replace(chain.tool, manifest=replace(chain.tool.manifest, tool_id=f"t{number}-{count}"))
    record(Path(project, ".ai", "kiwi.lock"), replace(chain, links=(named, *chain.links[1:])), None)
"""


@pytest.mark.usefixtures("processes")
def test_writers_in_other_processes_lose_nothing(chain: Chain, space: Space, path: Path) -> None:
    source = Path(kiwi_mcp.__file__).parent.parent
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, space.project, space.user, space.cache, str(number)],
            stdin=subprocess.PIPE,
            env={"PYTHONPATH": str(source)},
        )
        for number in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.close()
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 4

    assert len(Lock.read(path).tools) == 40
