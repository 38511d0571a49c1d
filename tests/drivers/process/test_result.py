"""Results of processes: value, logs and failure."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.drivers.process.conftest import Bench

from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.drivers.output import NotJsonOutput, parse


def sh(result_from: str) -> str:
    head = 'tool_id: sh_runtime\ntool_type: runtime\nversion: "1.0.0"\n'
    return f"{head}config: {{command: sh, result_from: {result_from}}}"


def run(bench: Bench, script: str, result_from: str = "stdout", **config: Json) -> Outcome:
    return bench.run(bench.chain({"main.sh": script}, bench.runtime(sh(result_from)), config=config))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("script", "result_from", "result", "stdout"),
    [
        ("echo '{\"a\": [1, null]}'", "stdout", {"a": [1, None]}, ""),
        ("echo hello; echo world", "stdout", "hello\nworld", ""),
        ("echo NaN", "stdout", "NaN", ""),
        ("echo 12", "stdout", 12, ""),
        ("true", "stdout", "", ""),
        ("echo '[1]'", "json_stdout", [1], ""),
        ("echo talk", "channel", None, "talk\n"),
        ("echo talk; echo '{\"a\":1}' > $KIWI_RESULT", "channel", {"a": 1}, "talk\n"),
        ("echo talk; echo 7 > $KIWI_RESULT", "stdout", 7, "talk\n"),
        ("echo talk; echo 7 > $KIWI_RESULT", "json_stdout", 7, "talk\n"),
    ],
)
def test_a_result_comes_from_the_configured_place_and_the_channel_wins(
    bench: Bench, script: str, result_from: str, result: Json, stdout: str
) -> None:
    outcome = run(bench, script, result_from)
    assert (outcome.status, outcome.result, outcome.logs.stdout) == ("success", result, stdout)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("script", "result_from"),
    [
        ("echo hello", "json_stdout"),
        ("true", "json_stdout"),
        ("echo NaN > $KIWI_RESULT", "stdout"),
        ("echo 1e999 > $KIWI_RESULT", "stdout"),
        ("echo '{' > $KIWI_RESULT", "channel"),
        ("printf '1 2' > $KIWI_RESULT", "channel"),
        ("head -c 1500 /dev/zero | tr '\\0' '[' > $KIWI_RESULT", "channel"),
    ],
)
def test_a_result_that_is_not_json_is_an_error(bench: Bench, script: str, result_from: str) -> None:
    outcome = run(bench, script, result_from)
    assert outcome.status == "error"
    assert "gave a result that is not JSON" in outcome.message


@pytest.mark.usefixtures("processes")
def test_a_result_over_the_limit_is_an_error(bench: Bench) -> None:
    outcome = run(bench, "{ printf '\"'; head -c 17000000 /dev/zero | tr '\\0' x; printf '\"'; } > $KIWI_RESULT")
    assert (outcome.status, outcome.message) == ("error", "`probe` gave a result of more than 16,000,000 bytes.")


@pytest.mark.usefixtures("processes")
def test_a_failure_contains_the_last_line_of_stderr_and_both_streams(bench: Bench) -> None:
    outcome = run(bench, "echo out; echo first >&2; echo 'last words' >&2; exit 3")
    assert outcome.message == "`probe` ended with exit code 3: last words"
    assert (outcome.status, outcome.exit_code) == ("error", 3)
    assert (outcome.logs.stdout, outcome.logs.stderr) == ("out\n", "first\nlast words\n")


@pytest.mark.usefixtures("processes")
def test_a_killed_tool_reports_the_signal(bench: Bench) -> None:
    outcome = run(bench, "kill -KILL $$")
    assert (outcome.status, outcome.exit_code, outcome.details["signal"]) == ("error", None, "SIGKILL")


@pytest.mark.usefixtures("processes")
def test_invalid_utf8_is_replaced_and_flagged(bench: Bench) -> None:
    outcome = run(bench, "printf 'a\\377b'")
    assert (outcome.result, outcome.details["replaced_characters"]) == ("a\N{REPLACEMENT CHARACTER}b", True)
    halves = run(bench, "printf '%s' '[\"\\ud800\"]' > $KIWI_RESULT")
    assert (halves.result, halves.details["replaced_characters"]) == (["?"], True)
    assert run(bench, "printf '%s' '\"\\ud83d\\ude00\"' > $KIWI_RESULT").result == "😀"


@pytest.mark.usefixtures("processes")
@pytest.mark.case("RES-09")
@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_flood_is_cut_and_its_total_size_is_reported(bench: Bench, stream: str) -> None:
    outcome = run(bench, f"head -c 50000000 /dev/zero | tr '\\0' x >&{stream}; exit 1")
    assert outcome.logs.is_truncated
    assert max(outcome.logs.stdout_bytes, outcome.logs.stderr_bytes) == 50_000_000
    assert len(outcome.logs.stdout) + len(outcome.logs.stderr) < 1_100_000


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("trap '' TERM; sleep 30 & wait; sleep 30", id="ignores SIGTERM"),
        pytest.param("kill -STOP $$", id="stops itself"),
        pytest.param("exec >&- 2>&-; sleep 30", id="closes its outputs", marks=pytest.mark.case("RES-11")),
    ],
)
def test_a_tool_that_does_not_end_is_stopped_at_its_timeout(bench: Bench, script: str) -> None:
    started = monotonic()
    outcome = run(bench, script, timeout=0.3)
    assert outcome.status == "timeout"
    assert "0.3 seconds" in outcome.message
    assert 0.3 <= monotonic() - started < 20


@pytest.mark.usefixtures("processes")
@pytest.mark.case("RES-13")
def test_a_tool_that_reads_more_input_gets_end_of_file(bench: Bench) -> None:
    assert run(bench, "cat > /dev/null; cat; echo done").result == "done"


@pytest.mark.usefixtures("processes")
async def test_a_hundred_calls_at_once_all_end(bench: Bench) -> None:
    chain = bench.chain({"main.sh": "cat"}, bench.runtime(sh("json_stdout")))

    async def all_at_once() -> list[Outcome]:
        return await asyncio.gather(*(bench.drive(chain, {"n": n}) for n in range(100)))

    assert [outcome.result for outcome in await all_at_once()] == [{"n": n} for n in range(100)]


@pytest.mark.usefixtures("processes")
def test_output_of_a_running_tool_is_reported(bench: Bench) -> None:
    bench.reports.append("started")
    run(bench, "echo '::progress 1/2 half way' >&2")
    assert any("half way" in report for report in bench.reports)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(value=json_values)
def test_any_json_is_parsed_unchanged(value: Json) -> None:
    heard = parse(json.dumps(value).encode())
    assert heard.value == json.loads(json.dumps(value)) or heard.is_repaired


@settings(max_examples=40, deadline=None)
@given(output=st.binary(max_size=200))
def test_no_output_breaks_the_parser(output: bytes) -> None:
    with suppress(NotJsonOutput):
        json.dumps(parse(output).value, ensure_ascii=False, allow_nan=False).encode()
