"""The official SDKs read the streams of the scripted model: its dialects are those of the providers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.plugins.scripted_model import KEY, MODEL, ScriptedModel, say, use

PYTHON = Path(sys.prefix) / "models" / "sdks" / "bin" / "python"
READERS = Path(__file__).with_name("sdk_readers.py")
STOPS = {
    "openai_chat": ("stop", "tool_calls"),
    "openai_responses": ("completed", "completed"),
    "anthropic": ("end_turn", "tool_use"),
    "gemini": ("STOP", "STOP"),
}


TURNS = (
    say("Nothing is new, as far as I know."),
    say("I look.", reasoning="Let me see.") & use("search", query="söme\nnews") & use("search", query="more"),
)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", STOPS)
def test_an_official_sdk_reads_what_the_scripted_model_says(
    scripted_model: ScriptedModel, processes: None, dialect: str
) -> None:
    scripted_model.will(*TURNS)
    words = [str(PYTHON), str(READERS), dialect, scripted_model.host, KEY, MODEL]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env={"PATH": os.defpath})

    assert done.returncode == 0, done.stderr[-3_000:]
    for turn, found in zip(TURNS, json.loads(done.stdout), strict=True):
        calls = [(name, json.loads(arguments)) for name, arguments in found["calls"]]
        assert found["text"] == turn.text
        assert calls == [(call.name, json.loads(call.arguments)) for call in turn.calls]
        assert found["stop"] == STOPS[dialect][bool(turn.calls)]
