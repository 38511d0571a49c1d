"""How the process of a command ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COMMAND = """
import atexit, sys
from kiwi_mcp.surfaces import start

def main():
    atexit.register(lambda: sys.stdout.write("registered\\n"))
    sys.stdout.write("output\\n")
    {ending}

start.main = main
start.command()
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("ending", "code", "complaint"),
    [
        ("return", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('a reason')", 1, "a reason\n"),
        ("raise RuntimeError('a fault')", 1, "RuntimeError: a fault\n"),
        ("raise KeyboardInterrupt", 130, "Interrupted.\n"),
    ],
)
def test_a_command_ends_with_its_code_after_what_was_registered(ending: str, code: int, complaint: str) -> None:
    words = [sys.executable, "-c", _COMMAND.format(ending=ending)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "output\nregistered\n")
    assert done.stderr.endswith(complaint)


@pytest.mark.usefixtures("processes")
def test_output_that_cannot_be_written_is_not_a_success() -> None:
    words = [sys.executable, "-c", _COMMAND.format(ending="return")]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode != 0


_IMPORTING = """
import os, signal, sys, time
from kiwi_mcp.surfaces import start

class Finder:
    def find_spec(self, name, *_):
        if name == "kiwi_mcp.kernel":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["runs"]
start.command()
"""


@pytest.mark.usefixtures("processes")
def test_ctrl_c_while_modules_are_imported_prints_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")
