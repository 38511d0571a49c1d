"""Releases to measure with: as many tools as wanted, each the top of a chain of three links, and stores of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice

from msgspec.structs import replace

from chains import TOOL
from kiwi_mcp import __version__
from kiwi_mcp.catalog.release import check_release, seed
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Actor, Pin, ReleaseFile, VersionName
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease

ACTOR = Actor("bench")
_BATCH = 10_000
_SCRIPT = ReleaseFile("main.sh", b'echo "$KIWI_PARAM_text"\n')


@contextmanager
def opened(url: str) -> Iterator[Registry]:
    """Give the registry at a URL, with what ships with Kiwi in it."""
    with closing(open_database(url)) as database:
        registry = Registry(database, ACTOR)
        seed(registry, __version__)
        yield registry


def releases(registry: Registry, count: int) -> Iterator[CheckedRelease]:
    """Give so many tools that stand on the registry's own `bash_runtime`, which stands on `subprocess`."""
    (runtime, *_) = registry.named("bash_runtime", namespace=BUILTIN_NAMESPACE)
    pin = Pin("bash_runtime", runtime.name, runtime.digest)
    read = check_release(_release(0, pin)).manifest
    for number in range(count):
        made = _release(number, pin)
        words = {"tool_id": made.name.tool_id, "description": f"Tool number {number}"}
        yield replace(made, manifest={**read, **words})


def fill(registry: Registry, count: int) -> None:
    """Publish so many tools, some thousands at a time."""
    every = releases(registry, count)
    while batch := tuple(islice(every, _BATCH)):
        registry.publish(batch)


def _release(number: int, pin: Pin) -> CheckedRelease:
    tool_id, manifest = f"tool_{number}", TOOL.format(number=number).encode()
    statement = statement_of(
        tool_id=tool_id,
        version="1.0.0",
        executor=pin.ref,
        manifest_body=manifest,
        files=[ToolFile(_SCRIPT.path, _SCRIPT.sha256, len(_SCRIPT.data), is_executable=False)],
    )
    return CheckedRelease(
        name=VersionName("public", tool_id, "1.0.0"),
        place=f"tools/group_{number % 20}/{tool_id}/tool.yaml",
        statement=statement,
        manifest={},
        files=(_SCRIPT, ReleaseFile("tool.yaml", manifest)),
        executor=pin,
    )
