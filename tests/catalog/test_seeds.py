"""The built-in items of every registry, with hashes that can be recomputed from the shipped files."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest
import yaml

from kiwi_mcp import __version__
from kiwi_mcp.catalog.release import BUILTIN, OFFICIAL, check_release, seed, seeds, shipped_digests
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Actor
from kiwi_mcp.kernel import Answer
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry

SEEDED = Path(__file__).parents[1] / "data" / "seeded.yaml"
PRIMITIVES = {"http_client", "subprocess"}
RUNTIMES = {"bash_runtime", "container_runtime", "deno_runtime", "llm_runtime", "node_runtime", "python_runtime"}
NATIVE = {"return", "ask", "spawn", "wait", "checkpoints", "code", "skill"} | {
    f"memory_{name}" for name in ("read", "write", "edit", "delete", "list", "search", "history", "export")
}
FILES = {f"files_{name}" for name in ("read", "write", "edit", "delete", "list", "search")}
GIT = {f"git_{name}" for name in ("status", "diff", "log", "commit", "init")}
PROVIDERS = {
    f"{name}_runtime"
    for name in (
        "anthropic", "deepseek", "gemini", "groq", "llamacpp", "lmstudio", "mistral", "ollama", "openai", "openrouter",
        "vllm",
    )
}  # fmt: skip
SERVERS = {"filesystem_mcp", "github_mcp", "postgres_mcp", "supabase_mcp"}


@pytest.fixture
def registry(database: Database) -> Registry:
    return Registry(database, Actor("ann"))


def contents(registry: Registry) -> list[tuple[str, str, bytes, dict[str, bytes]]]:
    """All that a registry holds, without the times at which it came."""
    found = registry.find(is_all_versions=True)
    releases = registry.read([listed.id for listed in found])
    return [
        (str(one.name), listed.closure, one.statement, {file.path: file.data for file in one.files})
        for listed, one in zip(found, releases, strict=True)
    ]


@pytest.mark.req("K-RG-05")
def test_a_fresh_registry_holds_the_primitives_the_runtimes_and_the_official_servers(registry: Registry) -> None:
    seed(registry, __version__)

    found = {listed.name.tool_id: listed for listed in registry.find()}

    built_in = PRIMITIVES | NATIVE | RUNTIMES | PROVIDERS | FILES | GIT
    assert set(found) == built_in | SERVERS
    assert all(listed.is_official and listed.name.namespace == BUILTIN_NAMESPACE for listed in found.values())
    assert {name for name, listed in found.items() if listed.is_builtin} == built_in
    assert {name for name, listed in found.items() if listed.executor is None} == PRIMITIVES | NATIVE
    assert [*registry.verify()] == []


@pytest.mark.req("K-RG-05")
def test_the_hashes_match_the_files_that_ship(registry: Registry) -> None:
    seed(registry, __version__)

    for release in registry.read([listed.id for listed in registry.find()]):
        base = BUILTIN if (BUILTIN / release.place).exists() else OFFICIAL
        folder = (base / release.place).parent
        for file in release.files:  # what tools share is in a folder beside them
            path = base / "tools" / file.path if file.path.startswith("lib/") else folder / file.path
            assert path.read_bytes() == file.data
        stated = json.loads(release.statement)
        assert release.digest == f"sha256:{sha256(release.statement).hexdigest()}"
        others = {file["path"]: file["sha256"] for file in stated["files"]}
        own = {file.path: file.sha256 for file in release.files if file.path != release.manifest_path}
        assert others == own
        manifest = next(file for file in release.files if file.path == release.manifest_path)
        assert manifest.sha256 in release.statement.decode()
        assert check_release(release).digest == release.digest


@pytest.mark.req("K-RG-05")
def test_a_second_start_seeds_nothing_and_a_new_registry_gets_the_same(registry: Registry, tmp_path: Path) -> None:
    seed(registry, __version__)
    head = registry.head()
    seed(registry, __version__)
    seed(registry, "99.0.0")
    assert registry.head() == head

    other = open_database(f"sqlite://{tmp_path}/other.db")
    new = Registry(other, Actor("bob"))
    seed(new, __version__)
    assert contents(new) == contents(registry)
    other.close()


@pytest.mark.req("K-RG-05")
def test_a_fresh_home_has_the_seeds_at_the_first_request(ask: Callable[..., Answer], home: Path) -> None:
    first = ask("execute", action="list").content
    (home / ".ai" / "state" / "registry.db").unlink()
    for left in (home / ".ai" / "state").glob("registry.db-*"):
        left.unlink()

    assert ask("execute", action="list").content == first
    assert ask("execute", action="verify").content["status"] == "verified"


def test_executors_come_before_the_items_that_use_them() -> None:
    places = dict(zip((release.name for release in seeds()), count(), strict=False))
    for release in seeds():
        if release.executor:
            assert places[release.executor.name] < places[release.name]
            assert release.executor.digest in shipped_digests()


@pytest.mark.req("K-RG-05")
def test_shipped_content_changes_only_with_its_version() -> None:
    """A registry that holds a version refuses other content for it, so a change in place could not be seeded."""
    known = yaml.safe_load(SEEDED.read_text())
    now = {f"{release.name.tool_id}@{release.name.version}": release.digest for release in seeds()}
    for name, digest in now.items():
        assert known.get(name, digest) == digest, (
            f"{name} has other content than the version of that number: raise `version:` in its manifest, "
            "then add the new line to tests/data/seeded.yaml and leave the old one there."
        )
    missing = {name: digest for name, digest in now.items() if name not in known}
    assert not missing, f"add to tests/data/seeded.yaml: {missing}"
    assert all(Version.parse(name.partition("@")[2]) for name in known)


def test_servers_of_one_service_declare_its_hosts_and_the_others_state_what_they_lack() -> None:
    found = {path.stem: yaml.safe_load(path.read_text()) for path in (OFFICIAL / "tools").rglob("*_mcp.yaml")}
    hosts = {name: one["needs"]["hosts"] for name, one in found.items() if "needs" in one}
    assert hosts == {"github_mcp": ["api.github.com"], "supabase_mcp": ["api.supabase.com"]}
    assert "kiwi mcp allow filesystem_mcp" in found["filesystem_mcp"]["description"]
    assert "kiwi relax postgres_mcp" in found["postgres_mcp"]["description"]
