"""Containers: the command line of a container engine, what a container may be given, its image, its end.

The engine starts with the rights of the owner, so it gets nothing from a manifest but an image, folders that are
granted, and a command for the inside. A container counts as the level `standard`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from stat import S_ISSOCK
from uuid import uuid4

from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import BuildFailed, InvalidManifest, IsolationUnavailable, PolicyDenied
from kiwi_mcp.domain.isolation import SandboxProfile, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.outcome import Outcome, Progress, Report, silent
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers.sandboxed import Sandbox, open_sandbox
from kiwi_mcp.manifest.runtime import RuntimeConfig, container_config, texts
from kiwi_mcp.manifest.templates import escape, variables
from kiwi_mcp.policy.needs import placed
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.primitives.process.spawn import completed
from kiwi_mcp.sandbox.levels import base_profile, demands
from kiwi_mcp.sandbox.process_setup import refuse_sockets

_PARAMETERS = "/kiwi/parameters.json"
_EVERY_HOST = "*"
_TIMEOUT, _BUILD_TIMEOUT = 60.0, 600.0
_ENGINE_FAILED = 125


def container_command(chain: Chain, words: RuntimeConfig, space: Space, path: str) -> tuple[str, ...]:
    """Return the command line of the first engine that is there, as templates; parameters fill the command inside."""
    tool, config = chain.tool, container_config(chain.tool)
    network = as_text(config.get("network")) or "none"
    if (network == "host") != bool(chain.needs.hosts) or chain.needs.hosts not in {(), (_EVERY_HOST,)}:
        fix = f"Write `network: host` and `needs: {{hosts: ['{_EVERY_HOST}']}}`, or neither."
        raise InvalidManifest(f"{tool.id!r}", [Issue("config.network", "a container reaches every host or none", fix)])
    engine = next((name for name in words.engines if shutil.which(name, path=path)), words.engines[0])
    user = os.geteuid()
    own = [f"--user={user}:{os.getegid()}", f"--network={network}"]
    own += ["--userns=keep-id"] if user and engine == "podman" else []
    for source, target, is_read_only in _volumes(tool, space):
        own.append(f"--volume={source}:{target}:{'ro' if is_read_only else 'rw'}")
    own.append(_image(tool))
    inside = texts(config.get("command"))
    if variables(list(inside)):
        issue = Issue("config.command", "a container is given no variables", "Send what it needs as a parameter.")
        raise InvalidManifest(f"{tool.id!r}", [issue])
    line = (one for word in words.command[1:] for one in (map(escape, own) if word == "{container}" else (word,)))
    return (engine, *line, *inside)


def engine_env() -> Mapping[str, str]:
    """Return the owner's variables by which an engine finds its service."""
    found = {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR"), "DOCKER_HOST": os.environ.get("DOCKER_HOST")}
    return {name: escape(value) for name, value in found.items() if value}


def check_container(plan: Plan, chain: Chain, space: Space) -> None:
    """Refuse a container for an item that must run more strictly, and a folder or network that is not granted."""
    tool, profile = chain.tool, plan.profile or SandboxProfile(strictest(()))
    if profile.level != "standard":
        raise IsolationUnavailable(
            f"A container counts as the level `standard`, and {tool.id!r} runs at `{profile.level}`.",
            suggestion=f"If you know the image: `kiwi sign {tool.id}`, then `kiwi relax {tool.id} --to standard`.",
            level=profile.level,
        )
    for source, _, is_read_only in _volumes(tool, space):
        word = "read" if is_read_only else "write"
        if not os.path.lexists(source) or not _is_granted(source, profile, is_read_only=is_read_only):
            raise PolicyDenied(
                f"The volume {source!r} of {tool.id!r} is not in a folder that is granted to it.",
                suggestion=f"Declare the folder itself, without links: `needs: {{{word}: [{source}]}}`.",
                path=source,
            )
        if S_ISSOCK(os.lstat(source).st_mode):
            raise PolicyDenied(
                f"The volume {source!r} is a socket, and no container is given one.",
                suggestion="Give it a folder of its own.",
                path=source,
            )
        if Path(source).is_dir():
            refuse_sockets(source, "Give the container a folder of its own.")
    if chain.needs.hosts and (_EVERY_HOST not in profile.private_hosts or profile.denied_hosts):
        raise PolicyDenied(
            f"{tool.id!r} asks for the network of this machine, where nothing limits which hosts it reaches.",
            suggestion="If you mean it, add '*' to `hosts.allow` of policy.yaml, and deny no hosts there.",
        )


def _is_granted(source: str, profile: SandboxProfile, *, is_read_only: bool) -> bool:
    """Whether a volume may be mounted, as the nearest folder around it is granted."""
    said = {**dict.fromkeys(profile.readable, "read"), **dict.fromkeys(profile.writable, "write")}
    said |= dict.fromkeys(profile.hidden, "")
    around = max((one for one in said if Path(source).is_relative_to(one)), key=len, default="")
    if os.path.realpath(source) != source or not said.get(around):
        return False
    obeyed = any(map(base_profile().is_protected, Path(source).relative_to(around).parts))
    return is_read_only or (said[around] == "write" and not obeyed)


async def run_container(
    plan: Plan,
    chain: Chain,
    space: Space,
    build_folder: str,
    report: Report,
    outcome_of: Callable[[ProcessResult], Outcome],
    confirm: Callable[[], None] | None,
) -> Outcome:
    """Run the container of a plan, and remove it however its engine ends."""
    assert isinstance(plan.spec, ProcessSpec) and plan.profile  # noqa: S101, PT018 - the driver makes no other
    check_container(plan, chain, space)
    sandbox = await open_sandbox(SandboxProfile("trusted", provenance=plan.profile.provenance), space)
    engine, name = plan.spec.argv[0], f"kiwi-{uuid4().hex}"
    call = ProcessSpec((engine,), plan.spec.cwd, plan.spec.env, timeout=_TIMEOUT)
    if "build_context" in chain.tool.manifest.config:
        await _build(call, chain.tool, build_folder, sandbox, report)
    parameters = space.cache / f"{name}.json"
    own = (f"--name={name}", f"--volume={parameters}:{_PARAMETERS}:ro", *_masks(chain.tool, plan.profile, space))
    spec = replace(plan.spec, argv=(*plan.spec.argv[:2], *own, *plan.spec.argv[2:]), stdin=b"")
    result = None
    try:
        with os.fdopen(os.open(parameters, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(plan.spec.stdin)
        result = await sandbox.run(spec, secrets={}, report=report, confirm=confirm)
    finally:
        parameters.unlink(missing_ok=True)
        if result is None or result.exit_code is None or result.timed_out or result.stopped:
            remove = replace(call, argv=(engine, "rm", "--force", name))
            await completed(sandbox.run(remove, secrets={}, report=silent))
    outcome = sandbox.tell(outcome_of(result), chain.isolation)
    if result.exit_code == _ENGINE_FAILED:
        image = _image(chain.tool)
        missing = f"Kiwi fetches no images: `{Path(engine).name} pull {image}`, unless it is here."
        outcome = replace(outcome, suggestion=f"The container was not started. {missing}")
    isolation: JsonObject = {
        **as_object(outcome.details["isolation"]),
        "used": plan.profile.level,
        "backend": Path(engine).name,
        "limited_by": Path(engine).name,
        "properties": sorted(demands("standard").requires),
    }
    return replace(outcome, details={**outcome.details, "isolation": isolation})


async def _build(call: ProcessSpec, tool: Tool, folder: str, sandbox: Sandbox, report: Report) -> None:
    """Build the image of the tool's own files, unless it is there. Its steps have no network."""
    image, engine = _image(tool), call.argv[0]
    known = await sandbox.run(replace(call, argv=(engine, "image", "inspect", image)), secrets={}, report=silent)
    if known.exit_code == 0:
        return
    report(Progress(f"Building the image of {tool.id}"))
    context = str(Path(folder, as_text(tool.manifest.config.get("build_context"))))
    local = ("--pull=never",) if Path(engine).name == "podman" else ()  # docker has no such word
    argv = (engine, "build", *local, "--network=none", f"--tag={image}", context)
    built = await sandbox.run(replace(call, argv=argv, timeout=_BUILD_TIMEOUT), secrets={}, report=silent)
    if built.exit_code != 0:
        lines = (built.stderr or built.stdout).decode(errors="replace").strip().splitlines()[-30:]
        raise BuildFailed(
            f"The image of {tool.id!r} could not be built: {chr(10).join(lines)}",
            suggestion="Fix its Containerfile. Its steps have no network, and what it begins with must be here.",
            tool_id=tool.id,
            exit_code=built.exit_code,
        )


def _image(tool: Tool) -> str:
    """Return the image: the one that is named, or one of the tool's own files, named by its content."""
    if "build_context" in tool.manifest.config:
        return f"localhost/kiwi/{tool.id.lower()}:{tool.digest.removeprefix('sha256:')[:32]}"
    return as_text(tool.manifest.config.get("image"))


def _volumes(tool: Tool, space: Space) -> Iterator[tuple[str, str, bool]]:
    """Yield the path on this machine, the path inside and whether it is read-only, of each volume."""
    for volume in map(as_object, as_list(tool.manifest.config.get("volumes"))):
        source = os.path.normpath(placed(as_text(volume.get("source")), os.path.realpath(space.project)))
        if {":", "{"} & {*source}:
            issue = Issue("config.volumes", f"{source!r} has a colon or a brace", "Use a folder without.")
            raise InvalidManifest(f"{tool.id!r}", [issue])
        yield source, as_text(volume.get("target")), volume.get("read_only") is True


def _masks(tool: Tool, profile: SandboxProfile, space: Space) -> Iterator[str]:
    """Yield the options that hide what is hidden below a volume, and keep what must not be changed there."""
    for source, target, _ in _volumes(tool, space):
        for path in (*profile.hidden, *profile.readable):
            if path == source or not Path(path).is_relative_to(source):
                continue
            inside = f"{target}/{Path(path).relative_to(source)}"
            if path not in profile.hidden:
                yield f"--volume={path}:{inside}:ro"
            elif Path(path).is_dir():
                yield f"--tmpfs={inside}:size=4k,mode=555"
            else:
                yield f"--volume=/dev/null:{inside}:ro"
