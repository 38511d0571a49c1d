"""The composite driver: calls the steps of a composite in the order of what they need.

Steps that may all be repeated without harm run in memory. Every other composite runs as a thread, which survives its
process and waits for the owner for days. Both follow `CompositeProgress`; every call passes all gates of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct, UnsetType, to_builtins

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import ApprovalRequired, InvalidManifest, KiwiError, ThreadWaiting
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, map_texts, text_of
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan, ReadSpec
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.drivers import Dispatch
from kiwi_mcp.drivers.thread import ThreadItem
from kiwi_mcp.manifest.composite import FAIL, Composite, CompositeStep, checked_composite, read_composite
from kiwi_mcp.manifest.expressions import compiled, is_true
from kiwi_mcp.manifest.templates import ABSENT, Absent, plain, render

AT_ONCE = 8
"""How many calls of a composite run at the same time."""
MAX_ELEMENTS = 1_000
"""How many elements `foreach` may have."""
_RETRIED = frozenset({"error", "execution_failed", "timeout", "unavailable"})
"""How a call may fail and be made again: what was refused, or may have been done, is not."""


class StepFault(Exception):
    """Why a step cannot begin: its templates name what is not there."""


class StepCall(Struct, frozen=True):
    """One call of a step; the element it is for is the number after the dot of its id."""

    id: str
    parameters: JsonObject = {}


class StepEnd(Struct, frozen=True, omit_defaults=True):
    """How a step ended."""

    status: Literal["ok", "failed", "skipped"]
    result: Json = None
    code: str = ""
    message: str = ""
    runs: tuple[str, ...] = ()


class StepBegin(Struct, frozen=True, omit_defaults=True):
    """A step that begins: its calls, or how it ended without any. `size` is the number of its elements."""

    id: str
    calls: tuple[StepCall, ...] = ()
    size: int | None = None
    end: StepEnd | None = None


class CallEnd(Struct, frozen=True):
    """How a call of a step ended."""

    is_ok: bool
    value: Json = None
    code: str = ""
    message: str = ""
    run_id: str = ""


class CompositeProgress:
    """Which steps have ended, which calls are under way, and which steps can begin. It decides and calls nothing."""

    def __init__(self, composite: Composite, inputs: JsonObject, declared: tuple[str, ...]) -> None:
        self.composite = composite
        self.steps = {step.id: step for step in composite.steps}
        self.ends: dict[str, StepEnd] = {}
        self.retry_at: dict[str, int] = {}
        """When a call that failed is made again, in milliseconds since 1970."""
        self._known = {**dict.fromkeys(declared, ABSENT), **inputs}
        self._begun: dict[str, StepBegin] = {}
        self._results: dict[str, CallEnd] = {}
        self._attempts: dict[str, int] = {}

    @property
    def failure(self) -> tuple[str, StepEnd] | None:
        """The first step that failed without anything that stands in for it, after which no step begins."""
        failed = ((one, end) for one, end in self.ends.items() if end.status == "failed")
        return next((pair for pair in failed if self.steps[pair[0]].on_error == FAIL), None)

    @property
    def is_done(self) -> bool:
        """Whether every step has ended."""
        return len(self.ends) == len(self.steps)

    def ready(self) -> list[StepBegin]:
        """Return the steps that can begin now."""
        if self.failure:
            return []
        found: list[StepBegin] = []
        for step in self.composite.steps:
            replaced = [one.id for one in self.composite.steps if one.stand_in == step.id]
            needs = (need for need in step.depends_on() if need not in replaced)
            has_ended = all(one in self.ends for one in replaced) and all(map(self._is_settled, needs))
            if has_ended and step.id not in self._begun:
                found.append(self._beginning(step, [self.ends[one].status for one in replaced]))
        return found

    def _is_settled(self, step_id: str) -> bool:
        end, stand_in = self.ends.get(step_id), self.steps[step_id].stand_in
        return end is not None and (end.status != "failed" or not stand_in or stand_in in self.ends)

    def _beginning(self, step: CompositeStep, replaced: Sequence[str]) -> StepBegin:
        """Return a step that begins; `replaced` has how the steps that it stands in for ended."""
        if replaced and "failed" not in replaced:
            return StepBegin(step.id, end=StepEnd("skipped"))
        try:
            if not isinstance(step.foreach, UnsetType):
                return self._each(step, filled(step.foreach, self._scope()))
            known = self._scope()
            if step.when and not is_true(compiled(step.when), known.context()):
                return StepBegin(step.id, end=StepEnd("skipped"))
            return StepBegin(step.id, (self._call(step, step.id, known),))
        except StepFault as fault:
            return StepBegin(step.id, end=StepEnd("failed", code="invalid_input", message=str(fault)))

    def _each(self, step: CompositeStep, elements: Json) -> StepBegin:
        if not isinstance(elements, list | tuple):
            raise StepFault(f"`foreach` needs a list, and it is {compact(elements)[:60]}.")
        if (size := len(elements)) > MAX_ELEMENTS:
            raise StepFault(f"`foreach` has {size:,} elements; at most {MAX_ELEMENTS:,} are possible.")
        scopes = {f"{step.id}.{n}": self._scope(item=item, index=n) for n, item in enumerate(elements)}
        if step.when:
            when = compiled(step.when)
            scopes = {call_id: known for call_id, known in scopes.items() if is_true(when, known.context())}
        calls = tuple(self._call(step, call_id, known) for call_id, known in scopes.items())
        return StepBegin(step.id, calls, size, None if calls else StepEnd("ok", result=[None] * size))

    def _call(self, step: CompositeStep, call_id: str, known: StepScope) -> StepCall:
        if step.ask and step.tool:  # its parameters may have the answer
            return StepCall(call_id)
        return StepCall(call_id, as_object(filled(step.parameters, known)))

    def begin(self, one: StepBegin) -> None:
        """Note that a step has begun."""
        self._begun[one.id] = one
        if one.end is not None:
            self.ends[one.id] = one.end

    def parameters(self, step: CompositeStep, answer: Json) -> JsonObject:
        """Return the parameters of a step that asked first."""
        return as_object(filled(step.parameters, self._scope(answer=answer)))

    def known_parameters(self, step: CompositeStep) -> JsonObject | None:
        """Return the parameters of a step as far as they are known before anything ran; None where they are not."""
        if not step.tool or step.ask or not isinstance(step.foreach, UnsetType) or step.depends_on():
            return None
        try:
            return as_object(filled(step.parameters, self._scope()))
        except StepFault:
            return None

    def message(self, step: CompositeStep) -> str:
        """Return the question of a step."""
        return text_of(filled(step.ask.message if step.ask else "", self._scope()))

    def end_call(self, call_id: str, end: CallEnd, at: int) -> bool:
        """Note how a call ended, and return whether that is final; one that is retried is made again."""
        step = self.steps[step_id(call_id)]
        made = self._attempts[call_id] = self._attempts.get(call_id, 0) + 1
        if not end.is_ok and end.code in _RETRIED and made < step.retry.attempts:
            self.retry_at[call_id] = at + min(step.retry.backoff_ms * 2 ** (made - 1), step.retry.max_backoff_ms)
            return False
        self._results[call_id] = end
        begun = self._begun[step.id]
        if not all(call.id in self._results for call in begun.calls):
            return True
        ends = {call.id: self._results[call.id] for call in begun.calls}
        runs = tuple(one.run_id for one in ends.values() if one.run_id)
        bad = next((one for one in ends.values() if not one.is_ok), None)
        result: Json = None
        if begun.size is not None:
            found = [ends.get(f"{step.id}.{n}") for n in range(begun.size)]
            result = [one.value if one and one.is_ok else None for one in found]
        elif not bad:
            result = ends[step.id].value
        if bad:
            self.ends[step.id] = StepEnd("failed", result, bad.code, bad.message, runs)
        else:
            self.ends[step.id] = StepEnd("ok", result, runs=runs)
        return True

    def _scope(self, **more: Json) -> StepScope:
        return StepScope({**self._known, **more, "steps": {one: self._shown(one) for one in self.ends}})

    def _shown(self, one: str) -> Mapping[str, Json | Absent]:
        end = self.ends[one]
        stand_in = self.ends.get(self.steps[one].stand_in) if end.status == "failed" else None
        valued = stand_in or end
        has_result = valued.status == "ok" or valued.result is not None
        error: JsonObject = {"code": end.code, "message": end.message}
        return {
            "status": end.status,
            "result": valued.result if has_result else ABSENT,
            "error": error if end.status == "failed" else ABSENT,
        }

    def output(self) -> Json:
        """Return the result of the composite: its `output`, else the results of all steps by their ids."""
        if isinstance(self.composite.output, UnsetType):
            shown = {one: self._shown(one)["result"] for one in self.steps if one in self.ends}
            return {one: value for one, value in shown.items() if not isinstance(value, Absent)}
        return filled(self.composite.output, self._scope())

    def summary(self, *, has_results: bool = False) -> JsonObject:
        """Return how each step ended so far."""
        hidden = () if has_results else ("result",)
        ends = {one: to_builtins(end) for one, end in self.ends.items()}
        return {one: {word: end[word] for word in end if word not in hidden} for one, end in ends.items()}

    def failed_message(self) -> str:
        """Return which step failed, and why."""
        name, end = self.failure or ("", StepEnd("failed", message="No step can begin."))
        return f"Step `{name}` failed: {end.message or end.code}" if name else end.message


def step_id(call_id: str) -> str:
    """Return the step of a call."""
    return call_id.partition(".")[0]


class StepScope(Mapping[str, "Json | Absent"]):
    """The values that templates and expressions of a step can name, by names with dots."""

    def __init__(self, known: Mapping[str, object]) -> None:
        self._known = known

    def __getitem__(self, name: str) -> Json | Absent:
        """Return a value; one of a step that did not run is absent."""
        head, *path = name.split(".")
        here: object = self._known[head]
        for at, part in enumerate(path):
            if isinstance(here, Absent):
                return ABSENT
            if not isinstance(here, Mapping) or part not in here:
                has = ", ".join(list(here)[:10]) if isinstance(here, Mapping) else "no names"
                place = ".".join([head, *path[:at]])
                raise StepFault(f"`{{{name}}}`: there is no `{part}` in `{place}`, which has {has or 'nothing'}.")
            here = here[part]
        return here  # type: ignore[return-value]  # every value in a scope is JSON or absent

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def context(self) -> JsonObject:
        """Return the values for an expression, in which what is absent is null."""
        return _present(self._known)


def _present(known: Mapping[str, object]) -> JsonObject:
    found = {name: _present(value) if isinstance(value, Mapping) else value for name, value in known.items()}
    return {name: value for name, value in found.items() if not isinstance(value, Absent)}  # type: ignore[misc]  # as above


def filled(template: Json, known: StepScope) -> Json:
    """Return a template with its values, which keep their types."""
    try:
        return map_texts(render(template, known), plain)
    except KiwiError as fault:
        raise StepFault(fault.message) from fault


def progress_of(chain: Chain, inputs: JsonObject) -> CompositeProgress:
    """Return the progress of a composite that has not begun."""
    manifest = chain.tool.manifest
    return CompositeProgress(
        checked_composite(manifest), inputs, tuple(as_object(manifest.parameters.get("properties")))
    )


def step_items(chain: Chain) -> dict[str, str]:
    """Return the identity of the item that each name in the steps of a composite means."""
    named = {one.ref: one.tool.identity for one in chain.references if one.by == chain.tool.identity}
    steps = read_composite(chain.tool.manifest.config).steps
    absent = [step.tool for step in steps if step.tool and step.tool not in named]
    if absent:
        fix = "Use fewer items: nest some steps in a composite of their own."
        raise InvalidManifest(chain.tool.id, [Issue("config.steps", f"{absent[0]!r:.80} is one item too many", fix)])
    return named


def is_repeatable(chain: Chain) -> bool:
    """Whether all steps of a composite, and of those it calls, are pure, and none asks."""
    manifests = [chain.tool.manifest, *(one.tool.manifest for one in chain.references)]
    composites = [one for one in manifests if "steps" in one.config]
    asks = any("ask" in as_object(step) for one in composites for step in as_list(one.config["steps"]))
    return not asks and all(one.effect == "pure" for one in manifests if one not in composites)


class CompositeItem(ThreadItem):
    """Runs the steps of a composite: in memory if all of them are pure, else as a thread."""

    driver = "composite"

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan all steps; a composite with faults is refused with all of them."""
        progress, items = progress_of(chain, inputs), step_items(chain)
        digests = {one.tool.identity: one.tool.digest for one in chain.references}
        steps: list[Json] = []
        for step in progress.composite.steps:
            item = items.get(step.tool, "")
            shown, known = to_builtins(step), progress.known_parameters(step)
            words: JsonObject = {word: shown[word] for word in shown if shown[word] not in ("", [], {}, None)}
            called: JsonObject = {"identity": item, "digest": digests[item]} if item else {}
            needs: JsonObject = {"needs": list(step.depends_on())}
            steps.append({**words, **needs, **called, **({} if known is None else {"inputs": known})})
        named = tuple((one.tool.identity, one.tool.digest) for one in chain.references)
        return Plan(
            identity=chain.tool.identity,
            tool_digest=chain.tool.digest,
            driver=self.driver,
            chain=((chain.tool.identity, chain.tool.digest), *dict.fromkeys(named)),
            spec=ReadSpec(path="", sha256=""),
            inputs=inputs,
            facts={"steps": steps, "durable": not is_repeatable(chain)},
            effect="pure" if is_repeatable(chain) else "idempotent",
        )

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Run the steps, and return the output with how each step ended."""
        if is_repeatable(chain):
            progress = progress_of(chain, plan.inputs)
            project: JsonObject = {"project_path": str(space.project)} if space.project_ai.is_dir() else {}
            try:
                if await _run_in_memory(progress, step_items(chain), dispatch, project):
                    return _outcome(progress)
            except TimeoutError:
                message = f"It took longer than {progress.composite.timeout or 0:g} seconds."
                return Outcome("timeout", message=message, details={"steps": progress.summary(has_results=True)})
        outcome = await super().drive(plan, chain, space, secrets=secrets, caller=caller, dispatch=dispatch)
        found = as_object(outcome.result)
        details = {**outcome.details, "steps": found.get("steps", {})}
        if outcome.is_success:
            return Outcome("success", result=found.get("output"), details=details)
        return Outcome("error", message=outcome.message, suggestion=outcome.suggestion, details=details)


def _outcome(progress: CompositeProgress) -> Outcome:
    if progress.failure:
        details: JsonObject = {"steps": progress.summary(has_results=True)}
        return Outcome("error", message=progress.failed_message(), details=details)
    try:
        return Outcome("success", result=progress.output(), details={"steps": progress.summary()})
    except StepFault as fault:
        return Outcome("error", message=f"`output`: {fault}", details={"steps": progress.summary(has_results=True)})


async def _run_in_memory(
    progress: CompositeProgress, items: Mapping[str, str], dispatch: Dispatch, project: JsonObject
) -> bool:
    """Run pure steps here; return False if a result is too large for that, so that they run as a thread."""
    waiting: list[StepCall] = []
    under_way: dict[asyncio.Task[CallEnd | None], StepCall] = {}
    try:
        async with asyncio.timeout(progress.composite.timeout):
            while True:
                while begun := progress.ready():
                    for one in begun:
                        progress.begin(one)
                        waiting += one.calls
                if progress.failure:
                    waiting.clear()
                while waiting and len(under_way) < AT_ONCE:
                    call = waiting.pop(0)
                    under_way[asyncio.create_task(_call(call, progress, items, dispatch, project))] = call
                if not under_way:
                    return True
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    call = under_way.pop(task)
                    if (end := task.result()) is None:
                        return False
                    if not progress.end_call(call.id, end, now_ms()):
                        waiting.append(call)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _call(
    call: StepCall, progress: CompositeProgress, items: Mapping[str, str], dispatch: Dispatch, project: JsonObject
) -> CallEnd | None:
    """Make one call; its failure is a result. Returns None where the result is not whole."""
    step = progress.steps[step_id(call.id)]
    await asyncio.sleep(max(0, progress.retry_at.get(call.id, 0) - now_ms()) / 1_000)
    request: JsonObject = {"item_id": items[step.tool], "parameters": call.parameters, **project}
    try:
        async with asyncio.timeout(step.timeout):
            answer = as_object(await dispatch("execute", request))
    except TimeoutError:
        return CallEnd(is_ok=False, code="timeout", message=f"It took longer than {step.timeout:g} seconds.")
    except (ApprovalRequired, ThreadWaiting):
        raise
    except KiwiError as error:
        return CallEnd(is_ok=False, code=error.code, message=f"{error.message} {error.suggestion}".strip())
    run = as_text(answer.get("run_id"))
    if as_text(answer.get("status")) not in {"success", "ready"}:
        message = as_text(answer.get("message"))
        return CallEnd(is_ok=False, code=as_text(answer.get("code")) or "error", message=message, run_id=run)
    return None if answer.get("result_is_preview") else CallEnd(is_ok=True, value=answer.get("result"), run_id=run)


create_driver = CompositeItem
