"""The runs verb: what calls left behind, listed, shown and removed."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

from kiwi_mcp.domain.errors import InvalidRequest, NotFound, RunNotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.run import Run, is_run_id
from kiwi_mcp.kernel.moments import milliseconds, moment_in
from kiwi_mcp.kernel.places import outputs_home, user_space
from kiwi_mcp.kernel.requests import RunsRequest
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.store.outputs import preview, read_record
from kiwi_mcp.store.runs import RunFilter, Runs

_LISTED = ("id", "tool_id", "identity", "status", "started_at", "duration_ms", "cost_micros", "code", "message")
_MOST_STEPS = 1_000
_PREFIX = re.compile(r"[0-9A-Za-z]{6,25}")
"""The beginning of an id, long enough to mean one."""
_ID_LENGTH = 26
_NAMED = 20
_LOOKED_AT = 1_000


def runs(request: RunsRequest, store: Runs, *, now: datetime) -> JsonObject:
    """Answer one request about runs."""
    match request.action:
        case "list":
            return _list(request, store, now)
        case "show":
            return _show(_required(request.run_id), store)
        case "prune":
            return _prune(store, now)


def _required(run_id: str | None) -> str:
    if run_id is None:
        issue = Issue("run_id", "is missing", "Name the run to show, by the `id` that a list gives.")
        raise InvalidRequest("The request names no run.", suggestion=issue.fix, issues=[issue.to_json()])
    return run_id


def _list(request: RunsRequest, store: Runs, now: datetime) -> JsonObject:
    if request.before is not None and not is_run_id(request.before):
        raise RunNotFound(request.before)
    wanted = RunFilter(
        tool_id=short(request.tool) if request.tool else None,
        status=request.status,
        project=_project(request.project_path) if request.project_path else None,
        since=moment_in("since", request.since, now),
        until=moment_in("until", request.until, now),
        before=request.before,
        limit=request.limit + 1,  # one more than is told says whether there are more
    )
    found = store.list(wanted)
    told = found[: request.limit]
    answer: dict[str, Json] = {
        "runs": [_line(run) for run in told],
        "next": told[-1].id if len(found) > len(told) else None,
    }
    if wanted.tool_id and not told:
        answer["suggestion"] = _known_tools(wanted.tool_id, store)
    return answer


def short(tool: str) -> str:
    """Return the short name in a reference, by which runs are listed."""
    return tool.rpartition("/")[2].partition("@")[0]


def _known_tools(tool_id: str, store: Runs) -> str:
    known = sorted({run.tool_id for run in store.list(RunFilter(limit=_LOOKED_AT))})
    if tool_id in known:
        return f"There are runs of {tool_id!r}, and none that fits the rest of what was asked."
    listed = ", ".join(f"`{name}`" for name in known[:_NAMED]) or "nothing yet"
    return f"No run of {tool_id!r} is recorded. {did_you_mean(tool_id, known)}Recorded lately: {listed}."


def _project(path: str) -> str:
    try:
        return os.path.realpath(path, strict=True)
    except (OSError, ValueError):
        return path  # runs stay when their project has gone


def _line(run: Run) -> JsonObject:
    whole = run.to_json()
    return {word: whole[word] for word in _LISTED if word in whole}


def _show(run_id: str, store: Runs) -> JsonObject:
    run = _found(run_id, store)
    return {**run.to_json(), **_result(run, store)}


def _found(run_id: str, store: Runs) -> Run:
    """Return the run of an id, or the only one whose id begins so."""
    if not _PREFIX.fullmatch(run_id):
        return store.get(run_id)
    start = run_id.upper()
    # Ids are in the order of time, so those that begin alike stand together.
    near = store.list(RunFilter(before=start.ljust(_ID_LENGTH, "Z"), limit=_NAMED))
    match [run for run in near if run.id.startswith(start)]:
        case []:
            raise RunNotFound(run_id)
        case [run]:
            return run
        case several:
            raise InvalidRequest(
                f"{run_id!r} is the beginning of several runs.",
                suggestion=f"Write more of it: {', '.join(run.id for run in several)}.",
            )


def _result(run: Run, store: Runs) -> JsonObject:
    """Return the words that carry a result: from the store where it is large, else from the file in its project."""
    if run.result_sha256:
        shown = preview(store.result(run.id).decode(errors="surrogatepass"))
        return {**shown, "result_handle": run.output} if run.output else shown
    if not run.output:
        return {}
    try:
        record = read_record(outputs_home(Path(run.project) / ".ai", user_space()), run.output)
    except NotFound:
        return {}
    # Another machine, or another time, may have another file under that name.
    return (
        {word: record[word] for word in ("result", "logs") if word in record} if record.get("run_id") == run.id else {}
    )


def _prune(store: Runs, now: datetime) -> JsonObject:
    removed, results = 0, 0
    for _ in range(_MOST_STEPS):
        step = store.prune(milliseconds(now))
        if not step.runs and not step.results:
            break
        removed, results = removed + step.runs, results + step.results
    told = f"{removed} run{'s' * (removed != 1)} and {results} large result{'s' * (results != 1)} removed"
    return {"action": "prune", "status": "success", "message": told, "runs": removed, "results": results}
