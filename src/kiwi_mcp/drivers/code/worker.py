"""Runs one program of code mode; a script of its own, which a sandbox starts and which knows nothing else of Kiwi.

It reads one JSON object per line and answers with one: `calls` that the program waits for, with a `snapshot` of the
program; or its `value`; or why it is `invalid` or has `failed`. `printed` is what it printed since the last answer.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

MOST_PRINTED = 20_000
"""How much of what a program prints is kept, in characters."""


class Program:
    """A program in the engine."""

    def __init__(self, engine: Any, session: Any) -> None:
        self._engine = engine
        self._session = session
        self._printed: list[str] = []
        self._room = MOST_PRINTED
        self._calls: dict[int, tuple[str, Any]] = {}
        self._at: Any = None

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check the program, and run it to its first calls or its end."""
        self._session.feed_run(request["prelude"], skip_type_check=True)
        inputs = {"inputs": request["inputs"]}
        return self._run(lambda: self._session.feed_start(request["code"], inputs=inputs, print_callback=self._print))

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Continue a program from a snapshot, with the results of the calls that it waited for."""
        snapshot = base64.b64decode(request["snapshot"])
        self._at = self._session.load_snapshot(snapshot, print_callback=self._print)
        return self.resume(request)

    def resume(self, request: dict[str, Any]) -> dict[str, Any]:
        """Continue the program with the results of its calls."""
        results = {int(number): self._result(one) for number, one in request["results"].items()}
        return self._run(lambda: self._at.resume(results))

    def _result(self, one: dict[str, Any]) -> dict[str, Any]:
        return {"exception": RuntimeError(one["error"])} if "error" in one else {"return_value": one["value"]}

    def _print(self, _: str, text: str) -> None:
        self._printed.append(text[: self._room])
        self._room -= len(self._printed[-1])

    def _run(self, step: Any) -> dict[str, Any]:
        """Run until the program waits for calls, has ended or has failed."""
        engine, self._calls = self._engine, {}
        try:
            at = step()
            while not isinstance(at, engine.MontyComplete | engine.FutureSnapshot):
                at = self._answer(at)
            answer = self._waiting(at) if isinstance(at, engine.FutureSnapshot) else {"value": _json(at.output)}
        except engine.MontyTypingError as error:
            answer = {"invalid": error.display()}
        except engine.MontySyntaxError as error:
            answer = {"invalid": error.display("type-msg")}
        except engine.MontyRuntimeError as error:
            answer = {"failed": error.display()}
        except engine.MontyError as error:  # the engine itself ended, such as for lack of memory
            answer = {"failed": f"{type(error).__name__}: {error}"}
        except (TypeError, ValueError, RecursionError) as error:
            answer = {"failed": f"The result is not JSON: {error}. Return text, numbers, lists and dicts."}
        printed, self._printed = "".join(self._printed), []
        return {**answer, "printed": printed}

    def _answer(self, at: Any) -> Any:
        """Answer a question of the engine that is no wait: which function a name is, that a call was noted."""
        if isinstance(at, self._engine.NameLookupSnapshot):
            return at.resume(value=_call) if at.variable_name == "_call" and at.object_id is None else at.resume()
        if at.is_os_function:
            return at.resume_not_handled()
        name, arguments = at.args if len(at.args) == 2 and not at.kwargs else ("", None)  # noqa: PLR2004 - as declared
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return at.resume({"exception": TypeError("Call the functions of `tools` by name.")})
        try:
            json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return at.resume({"exception": TypeError(f"An argument of {name} is not JSON: {error}")})
        self._calls[at.call_id] = (name, arguments)
        return at.resume({"future": ...})

    def _waiting(self, at: Any) -> dict[str, Any]:
        self._at = at
        calls = [[number, *self._calls[number]] for number in at.pending_call_ids if number in self._calls]
        if len(calls) != len(at.pending_call_ids):
            return {"failed": "The program waits for a call that it made earlier: `await` each call at once."}
        return {"calls": calls, "snapshot": base64.b64encode(at.dump()).decode()}


async def _call(name: str, arguments: dict[str, Any]) -> None:
    """Stand for the function that makes calls; the engine asks the host instead of running it."""


def _json(value: Any) -> Any:
    """Return a value as JSON has it; a set becomes a list."""
    return json.loads(json.dumps(value, allow_nan=False, default=_as_list))


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def main() -> None:
    """Answer requests until the input ends."""
    import pydantic_monty as engine  # noqa: PLC0415 - only this process has it

    first = json.loads(sys.stdin.readline())
    options = {"type_check": True, "type_check_format": "concise", "type_check_stubs": first.get("stubs")}
    limits, policy = first["limits"], engine.OSPolicy(sleep_system_max=10.0)
    with engine.Monty(max_processes=1) as pool, pool.checkout(limits=limits, os_policy=policy, **options) as session:
        program, request = Program(engine, session), first
        while True:
            step = program.load if "snapshot" in request else program.start if "code" in request else program.resume
            sys.stdout.write(f"{json.dumps(step(request))}\n")
            sys.stdout.flush()
            if not (line := sys.stdin.readline()):
                os._exit(0)  # the engine has nothing to save, and the sandbox ends it
            request = json.loads(line)


if __name__ == "__main__":
    main()
