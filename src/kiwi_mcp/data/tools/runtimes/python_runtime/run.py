"""Runs one Python file with parameters: `python run.py FILE`, parameters as JSON on standard input.

The first of these functions that the file defines is called, and what it returns is the result:

    main(**parameters)      run(**parameters)      execute(**parameters)

Each may be `async`. A first argument named params, parameters, arguments, inputs, data or kwargs that is no parameter
itself gets them all as one dict; an argument named project_path gets the project's folder. A file without such a
function, or whose function takes nothing while parameters were given, is a plain script: it runs as `__main__` with
`--name=value` arguments and the JSON on standard input, and what it prints is the result.
"""

import sys
from io import BytesIO, TextIOWrapper
from json import JSONEncoder, loads
from os import environ
from types import CodeType, ModuleType

NAMES = ("main", "run", "execute")
WHOLE = {"params", "parameters", "arguments", "inputs", "data", "kwargs"}
TAKES_ANY = 0x04 | 0x08  # *args or **kwargs in co_flags


def start(path):
    raw = sys.stdin.buffer.read()
    parameters = loads(raw) if raw.strip() else {}
    sys.argv = [path, *(f"--{name}={text(value)}" for name, value in parameters.items())]
    sys.path.insert(0, path.rpartition("/")[0])
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    name = function_name(code, parameters)
    if name is None:
        # The script reads its parameters itself.
        sys.stdin = TextIOWrapper(BytesIO(raw), encoding="utf-8")
        load(code, path, "__main__")
    else:
        # Only the value returned below is a result, so nothing else may find the channel.
        channel = environ.pop("KIWI_RESULT", "")
        answer(call(getattr(load(code, path, "__tool__"), name), parameters), name, channel)


def function_name(code, parameters):
    """Return the function to call, found without running anything; None for a plain script."""
    defined = {part.co_name: part for part in code.co_consts if isinstance(part, CodeType)}
    for name in NAMES:
        if name in defined:
            function = defined[name]
            takes = function.co_argcount + function.co_kwonlyargcount or function.co_flags & TAKES_ANY
            return name if takes or not parameters else None
    return None


def load(code, path, name):
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module


def call(function, parameters):
    names = arguments_of(function)
    extra = {"project_path": environ.get("KIWI_PROJECT", "")} if "project_path" in names else {}
    if names and names[0] in WHOLE and names[0] not in parameters:
        value = function(parameters, **extra)
    else:
        value = function(**{**extra, **parameters})
    if hasattr(value, "__await__"):
        from asyncio import run  # costs more than all the rest, so only where it is needed

        value = run(finished(value))
    return value


def arguments_of(function):
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()


async def finished(value):
    return await value


def answer(value, name, channel):
    try:
        encoded = JSONEncoder(ensure_ascii=False, allow_nan=False, default=plain).encode(value)
    except (TypeError, ValueError, RecursionError) as fault:
        sys.exit(f"{name}() returned a value that is not JSON: {fault}")
    if not channel:  # started by hand
        print(encoded)
        return
    with open(channel, "wb") as out:
        out.write(encoded.encode("utf-8", "surrogatepass"))


def plain(value):
    """Return a value JSON can hold for one that it cannot."""
    kind = type(value)
    if hasattr(kind, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(kind, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in kind.__dataclass_fields__}
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if hasattr(kind, "isoformat"):
        return value.isoformat()
    if hasattr(kind, "__fspath__"):
        return value.__fspath__()
    if hasattr(kind, "tolist"):
        return value.tolist()
    if kind.__name__ in {"Decimal", "UUID", "Fraction"}:
        return str(value)
    if hasattr(kind, "__members__"):
        return value.value
    if hasattr(kind, "keys") and hasattr(kind, "__getitem__"):
        return dict(value)
    raise TypeError(f"it holds a {kind.__module__}.{kind.__qualname__}")


def text(value):
    if isinstance(value, str):
        return value
    return JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode(value)


def without_runner(trace):
    """Return a traceback that begins in the tool's own code."""
    frame = trace
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            trace = frame.tb_next
        frame = frame.tb_next
    return trace


if __name__ == "__main__":
    try:
        start(sys.argv[1])
    except Exception as error:
        trace = without_runner(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
