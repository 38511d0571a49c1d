"""Processes that are killed by tests: a parent that has imported everything, and workers that it forks.

A line of JSON on the input begins a worker, or waits for the end of one; each is answered with a line. A worker opens
the store by itself, works until it is killed, and logs acknowledged writes in its own file.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.errors import VersionConflict
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.domain.registry import Actor, Pin, ReleaseFile, VersionName
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.manifest.type_specs import load_type_specs
from kiwi_mcp.store import postgres, sqlite
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.runs import EndedRun, RunRetention, Runs, new_run

IMPORTED = (postgres, sqlite)
"""What is otherwise imported by its name when a store is opened: a worker's life is spent on the store."""
TEAM = Actor("ann", ("team",))
Tell = Callable[[str], None]


def release(
    tool_id: str, version: str, code: bytes, *, on: CheckedRelease | None = None, changelog: str = ""
) -> CheckedRelease:
    """A version with a manifest, a text and something binary, on another one or on nothing."""
    ref = on.name.tool_id if on else None
    text = (
        f"tool_id: {tool_id}\ntool_type: {'runtime' if on else 'primitive'}\nversion: {version}\ndescription: Says.\n"
    )
    text += f"executor: {ref}\n" if ref else ""
    files = (ReleaseFile("data.bin", b"\0" + code * 20), ReleaseFile("main.py", code))
    statement = statement_of(
        tool_id=tool_id,
        version=version,
        executor=ref,
        manifest_body=text.encode(),
        files=[ToolFile(file.path, file.sha256, len(file.data), file.is_executable) for file in files],
    )
    return CheckedRelease(
        name=VersionName("team", tool_id, version),
        place=f"tools/{tool_id}/tool.yaml",
        statement=statement,
        manifest={"tool_id": tool_id, "tool_type": "runtime" if on else "primitive", "version": version},
        files=(*files, ReleaseFile("tool.yaml", text.encode())),
        executor=Pin(ref, on.name, on.digest) if on and ref else None,
        changelog=changelog,
    )


def publish(words: JsonObject, tell: Tell) -> None:
    """Publish pairs of one's own, take some back, record runs, and compete for the next version of a shared item."""
    chance, life = random.Random(str(words["seed"])), as_text(words["life"])
    registry = Registry(open_database(as_text(words["url"])), TEAM)
    runs = Runs(registry.database, retention=RunRetention(count=1_000_000))
    for step in count():
        pair = f"{life}.{step}"
        code = chance.randbytes(chance.choice((30, 300, 5_000))).hex().encode()
        below = release(f"below_{life}", f"1.0.{step}", code, changelog=pair)
        top = release(f"top_{life}", f"1.0.{step}", code, on=below, changelog=pair)
        _tell_kept(registry, [below, top], tell)
        if chance.random() < 0.3:
            registry.set_status([top.name], "yank", reason="it was wrong")
            tell(f"yanked {top.name} -")
        _tell_kept(registry, [release("shared", _next(registry), code)], tell)
        tell(f"ran {_record(runs, code * 50)} -")


def _tell_kept(registry: Registry, releases: Sequence[CheckedRelease], tell: Tell) -> None:
    try:
        for one in registry.publish(releases):
            tell(f"kept {one.name} {one.digest}")
    except VersionConflict:
        pass  # another worker was quicker


def _next(registry: Registry) -> str:
    found = registry.named("shared")
    latest = Version.parse(found[0].name.version) if found else None
    return f"1.0.{latest.patch + 1}" if latest else "1.0.0"


def _record(runs: Runs, result: bytes) -> str:
    """Record a small run and one with a large result, and return the second."""
    now = time.time_ns() // 1_000_000
    id_, started_at = new_run(now)
    small = RunRecord(id_, "say", "success", started_at, 5, "ann", "/somewhere", message="m" * 300)
    if not runs.record_now([EndedRun(small, None)]):
        runs.add(small)
    large = replace(small, id=new_run(now)[0], result_sha256=sha256(result).hexdigest(), result_size=len(result))
    runs.add(large, result)
    return large.id


def pull(words: JsonObject, tell: Tell) -> None:
    """Pull everything from a remote, or one version after the other."""
    chance, source = random.Random(str(words["seed"])), as_text(words["source"])
    offered = as_object(words["offered"])
    if chance.random() < 0.6:
        _ask(words, "registry", {"action": "pull", "remote": source, "accept_unsigned": True})
        for name, digest in offered.items():
            tell(f"kept {name} {digest}")
    for name in chance.sample([*offered], len(offered)):
        said: JsonObject = {"from": source, "accept_unsigned": True}
        got = _ask(words, "execute", {"action": "pull", "item_id": name, "parameters": said})
        tell(f"kept {as_text(got['identity']).removeprefix('registry/')} {got['digest']}")


def open_store(words: JsonObject, tell: Tell) -> None:
    """Make a store of an empty place: its schema, and what comes with Kiwi."""
    shown = _ask(words, "registry", {"action": "show"})
    tell(f"opened {words['url']} {shown['versions']}")


def author(words: JsonObject, tell: Tell) -> None:
    """Publish items of a project through the kernel, and read them, which leaves runs."""
    chance = random.Random(str(words["seed"]))
    names = [as_text(name) for name in as_list(words["items"])]
    for name in chance.sample(names, len(names)):
        request: JsonObject = {"action": "publish", "item_id": name, "parameters": {"namespace": "team"}}
        got = _ask(words, "execute", request)
        tell(f"kept {as_text(got['identity']).removeprefix('registry/')} {got['digest']}")
        tell(f"ran {_ask(words, 'execute', {'item_id': name})['run_id']} -")


def migrate(words: JsonObject, tell: Tell) -> None:
    """Bring an old folder to today's form."""
    done = _ask(words, "migrate", {"apply": True, "rewrite": True})
    tell(f"migrated {words['project']} {len(as_list(done['items']))}")


def use(words: JsonObject, tell: Tell) -> None:
    """Call a tool that waits for the owner, answer as the owner, and call again what others left behind.

    The tool writes each word at most once: a killed call is repeated, and not approved again.
    """
    chance, life = random.Random(str(words["seed"])), as_text(words["life"])
    os.environ["KIWI_REGISTRY"] = as_text(words["url"])
    project = Path(as_text(words["project"]))
    model, owner = Kernel(project, is_owner=False), Kernel(project)

    def call(word: str) -> JsonObject:
        # The worker that began a word continues with it.
        caller = Caller(name=f"model-{word.partition('.')[0]}")
        request: JsonObject = {"item_id": "note", "parameters": {"word": word}}
        return _loop().run_until_complete(model.call("execute", request, caller)).content

    for word in map(as_text, as_list(words["left"])):
        answer = call(word)
        assert answer.get("code") in {None, "approval_required"}, answer
        tell(f"asked {answer['approval_id']} {word}" if "code" in answer else f"ran {answer['run_id']} {word}")
    for step in count():
        word = f"{life}.{step}"
        asked = call(word)
        assert asked.get("code") == "approval_required", asked
        tell(f"asked {asked['approval_id']} {word}")
        if step and chance.random() < 0.15:
            continue  # a question that waits
        request: JsonObject = {"action": "approve", "approval_id": asked["approval_id"]}
        approved = _loop().run_until_complete(owner.call("approvals", request)).content
        assert approved.get("status") == "approved", approved
        tell(f"approved {asked['approval_id']} {word}")
        ran = call(word)
        assert ran.get("status") == "success", ran
        tell(f"ran {ran['run_id']} {word}")


def _ask(words: JsonObject, verb: str, request: JsonObject) -> JsonObject:
    """Ask a kernel that lives as long as this process."""
    os.environ["KIWI_REGISTRY"] = as_text(words["url"])
    if not _kernels:
        _kernels.append(Kernel(Path(as_text(words["project"]))))
    answer = _loop().run_until_complete(_kernels[0].call(verb, request))
    if "error" in answer.content:
        raise AssertionError(answer.content)
    return answer.content


_kernels: list[Kernel] = []
_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


WORKS = {"publish": publish, "pull": pull, "open": open_store, "author": author, "migrate": migrate, "use": use}


def _begin(words: JsonObject) -> int:
    """Fork a worker, and return its number; whatever it fails with, it says so."""
    pid = os.fork()
    if pid:
        return pid
    file = os.open(as_text(words["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(line: str) -> None:
        # One call of the system each: a line is there whole, and before the next thing is begun.
        os.write(file, f"{line}\n".encode())

    try:
        WORKS[as_text(words["work"])](words, tell)
        tell("done")
    except BaseException:  # noqa: BLE001 - reported to the waiting process
        tell(f"failed {json.dumps(traceback.format_exc())}")
    os._exit(0)


def _requests() -> Iterator[JsonObject]:
    for line in sys.stdin:
        yield as_object(json.loads(line))


def main() -> None:
    """Begin workers and wait for them as the input says; at its end, end those that are left."""
    load_type_specs()
    left: set[int] = set()
    for words in _requests():
        if "wait" in words:
            pid = int(str(words["wait"]))
            _, status = os.waitpid(pid, 0)
            left.discard(pid)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = _begin(words)
            left.add(answer)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
