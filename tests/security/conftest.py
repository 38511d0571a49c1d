"""What these tests stand on: a kernel that keeps running, and folders that can be compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from kiwi_mcp.kernel import Answer, Kernel


@pytest.fixture
def kernel(project: Path) -> Kernel:
    """One kernel for the whole test."""
    return Kernel(project)


@pytest.fixture
def ask(kernel: Kernel) -> Callable[..., Answer]:
    """Send one request, as a client would, and return its answer."""
    return lambda verb, **request: asyncio.run(kernel.call(verb, json.loads(json.dumps(request))))


@pytest.fixture
def tree() -> Callable[[Path], Mapping[str, str]]:
    """Every file below a folder, by path, with a hash of its bytes."""

    def hashes(folder: Path) -> Mapping[str, str]:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}

    return hashes
