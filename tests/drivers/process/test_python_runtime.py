"""The Python runtime, as the author of a Python file sees it."""

from __future__ import annotations

import pytest
from tests.drivers.process.conftest import Bench

from kiwi_mcp.domain.json import Json

pytestmark = pytest.mark.usefixtures("processes")


SENTIMENT = """
import json
import sys

def run(text):
    return {"polarity": 1.0 if "good" in text else 0.0}

if __name__ == "__main__":
    result = run(sys.argv[1])
    print(json.dumps(result))
"""


def value(bench: Bench, source: str, **inputs: Json) -> Json:
    outcome = bench.run(bench.chain({"main.py": source}, "python_runtime"), inputs)
    assert outcome.status == "success", outcome
    return outcome.result


@pytest.mark.req("K-RT-02")
@pytest.mark.parametrize(
    "source",
    [
        "def main(name, times=2):\n    return name * times",
        "async def main(name, times=2):\n    return name * times",
        "def run(name, times=2):\n    return name * times",
        "async def run(*, name, times=2):\n    return name * times",
        "def main(**kwargs):\n    return kwargs['name'] * 2",
        "def main(params):\n    return params['name'] * 2",
        "def execute(params, project_path):\n    assert project_path\n    return params['name'] * 2",
        "async def execute(params, project_path):\n    return params['name'] * 2",
        "import sys\nprint('\"' + sys.argv[1].removeprefix('--name=') * 2 + '\"')",
        "import json, sys\nprint(json.dumps(json.load(sys.stdin)['name'] * 2))",
        "import argparse\ndef main():\n    p = argparse.ArgumentParser()\n    p.add_argument('--name')\n"
        "    print(p.parse_args().name * 2)\nif __name__ == '__main__':\n    main()",
    ],
)
def test_every_form_of_a_python_tool_gets_its_parameters(bench: Bench, source: str) -> None:
    assert value(bench, source, name="ab") == "abab"


@pytest.mark.req("K-RT-02")
def test_prints_go_to_the_logs_and_never_into_the_result(bench: Bench) -> None:
    source = "import sys\ndef main():\n    print('out')\n    print('err', file=sys.stderr)\n    return {'a': 1}"
    outcome = bench.run(bench.chain({"main.py": source}, "python_runtime"))
    assert (outcome.result, outcome.logs.stdout, outcome.logs.stderr) == ({"a": 1}, "out\n", "err\n")


def test_a_function_that_returns_nothing_has_the_result_null(bench: Bench) -> None:
    assert value(bench, "def main():\n    print('busy')") is None


def test_the_return_value_of_run_counts_and_not_the_output_of_a_main_block(bench: Bench) -> None:
    assert value(bench, SENTIMENT, text="a good day") == {"polarity": 1.0}


@pytest.mark.smoke
@pytest.mark.req("K-TY-03")
def test_an_entrypoint_imports_the_files_beside_it(bench: Bench) -> None:
    files = {
        "main.py": "from lib.words import greet\ndef main(name):\n    return greet(name)",
        "lib/words.py": "def greet(name):\n    return f'hello {name}'",
    }
    assert bench.run(bench.chain(files, "python_runtime"), {"name": "kiwi"}).result == "hello kiwi"


def test_values_without_a_json_type_are_converted(bench: Bench) -> None:
    source = """
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import Path

class Colour(Enum):
    RED = "red"

@dataclass
class Point:
    x: int
    tags: set

def main():
    return [Point(1, {"b", "a"}), date(2026, 1, 2), Decimal("1.10"), Path("a/b"), Colour.RED, (1, 2)]
"""
    assert value(bench, source) == [{"x": 1, "tags": ["a", "b"]}, "2026-01-02", "1.10", "a/b", "red", [1, 2]]


@pytest.mark.parametrize(
    ("returned", "named"),
    [("object()", "builtins.object"), ("float('nan')", "float"), ("{(1, 2): 3}", "keys"), ("b'x'", "bytes")],
)
def test_a_value_that_cannot_be_json_is_an_error_that_names_it(bench: Bench, returned: str, named: str) -> None:
    outcome = bench.run(bench.chain({"main.py": f"def main():\n    return {returned}"}, "python_runtime"))
    assert (outcome.status, outcome.exit_code) == ("error", 1)
    assert named in outcome.message


def test_an_exception_is_an_error_with_a_traceback_of_the_author_file_only(bench: Bench) -> None:
    source = "import asyncio\nasync def main(x):\n    await asyncio.sleep(0)\n    raise KeyError('lost')"
    chain = bench.chain({"main.py": source}, "python_runtime")
    outcome = bench.run(chain, {"x": 1})
    assert (outcome.status, outcome.exit_code) == ("error", 1)
    assert outcome.message == "`probe` ended with exit code 1: KeyError: 'lost'"
    assert f'File "{chain.tool.origin.root}/main.py", line 4, in main' in outcome.logs.stderr
    assert "run.py" not in outcome.logs.stderr
    assert "cache" not in outcome.logs.stderr


def test_a_syntax_error_names_the_line_in_the_author_file(bench: Bench) -> None:
    chain = bench.chain({"main.py": "x = 1\ndef main(:\n    pass"}, "python_runtime")
    outcome = bench.run(chain)
    assert outcome.status == "error"
    assert f'File "{chain.tool.origin.root}/main.py", line 2' in outcome.logs.stderr


def test_the_exit_code_of_a_tool_is_respected(bench: Bench) -> None:
    source = "import sys\ndef main(code):\n    sys.exit(code)"
    chain = bench.chain({"main.py": source}, "python_runtime")
    assert (bench.run(chain, {"code": 3}).status, bench.run(chain, {"code": 3}).exit_code) == ("error", 3)
    assert bench.run(chain, {"code": 0}).status == "success"


def test_a_tool_named_like_a_standard_module_runs(bench: Bench) -> None:
    chain = bench.chain({"json.py": "def main(a):\n    return {'a': a}"}, "python_runtime")
    assert bench.run(chain, {"a": 1}).result == {"a": 1}


def test_classes_of_a_tool_can_be_pickled(bench: Bench) -> None:
    source = "import pickle\nclass A:\n    pass\ndef main():\n    return type(pickle.loads(pickle.dumps(A()))).__name__"
    assert value(bench, source) == "A"
