"""The shipped encoder: intact, accurate, shared by threads, and optional."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kiwi_mcp.search import encoder
from kiwi_mcp.search.encoder import HOME, MiniLM, encoder_name, encoder_state, load_encoder

ROOT = Path(__file__).parents[2]
FACTS = json.loads((HOME / "encoder.json").read_bytes())
SENTENCES = (
    "Send an e-mail to a colleague", "Mail a message to someone", "Convert a spreadsheet to PDF", "Play some jazz",
    "Export a table as a document", "What is the weather like in Paris?", "Forecast for a city", "get_user_by_id",
    "Delete a branch of a repository", "Cancel my subscription", "Fetch a person's profile", "List open issues",
    "Translate a text into Spanish", "Resize an image", "Book a table at a restaurant", "Start a container",
)  # fmt: skip


@pytest.fixture(scope="module")
def shipped(encoder_model: None) -> MiniLM:
    return MiniLM(HOME)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the encoder's files, from which it is loaded anew."""
    shutil.copytree(HOME, tmp_path / "encoder")
    monkeypatch.setattr(encoder, "HOME", tmp_path / "encoder")
    encoder._load.cache_clear()
    yield tmp_path / "encoder"
    encoder._load.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.onnx", "pieces.npy", "vocabulary.txt"])
def test_the_shipped_files_match_their_recorded_hashes(name: str) -> None:
    assert sha256((HOME / name).read_bytes()).hexdigest() == FACTS["sha256"][name]


@pytest.mark.usefixtures("encoder_model")
def test_the_licence_of_the_weights_ships_beside_them() -> None:
    assert FACTS["licence"] == "Apache-2.0"
    assert "Apache License" in (HOME / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize(("one", "other", "nearness"), [
    ("Send an e-mail to a colleague", "Mail a message to someone", 0.700),
    ("Convert a spreadsheet to PDF", "Export a table as a document", 0.442),
    ("What is the weather like in Paris?", "Forecast for a city", 0.372),
    ("Delete a branch of a repository", "Forecast for a city", -0.055),
    ("Play some jazz", "Cancel my subscription", 0.033),
    ("get_user_by_id", "Fetch a person's profile", 0.421),
])  # fmt: skip
def test_similarities_match_the_full_weights(shipped: MiniLM, one: str, other: str, nearness: float) -> None:
    first, second = shipped.encode([one, other])

    assert float(first @ second) == pytest.approx(nearness, abs=0.04)


def test_a_text_has_one_vector_in_any_batch(shipped: MiniLM) -> None:
    together = shipped.encode(SENTENCES)

    assert together.shape == (len(SENTENCES), shipped.dimension)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-5)
    assert all(np.array_equal(shipped.encode([text])[0], row) for text, row in zip(SENTENCES, together, strict=True))


def test_the_first_dimensions_are_the_most_important(shipped: MiniLM) -> None:
    shares = np.sum(shipped.encode(SENTENCES)[:, : shipped.dimension // 3] ** 2, axis=1)

    assert shares.mean() > 0.6  # of vectors that are not turned a third holds a third


@pytest.mark.parametrize("text", ["", "\0", "🎉" * 300, "\ud800", "word " * 100_000])
def test_any_text_has_a_vector(shipped: MiniLM, text: str) -> None:
    assert np.linalg.norm(shipped.encode([text])) == pytest.approx(1, abs=1e-5)


@pytest.mark.smoke
def test_a_long_text_is_encoded_by_its_beginning(shipped: MiniLM) -> None:
    one, other = shipped.encode([f"{'red ' * 200}{end}" for end in ("apples", "bicycles")])

    assert np.array_equal(one, other)


def test_no_texts_give_no_vectors(shipped: MiniLM) -> None:
    assert shipped.encode([]).shape == (0, shipped.dimension)


@pytest.mark.usefixtures("encoder_model")
def test_the_weights_are_small_enough_to_avoid_overflow() -> None:
    # Where pairs of products are added in sixteen bits, two products of 255 and 64 still fit.
    graph = next(value for field, value in _fields((HOME / "model.onnx").read_bytes()) if field == 7)
    constants = [dict(_fields(value)) for field, value in _fields(graph) if field == 5]
    matrices = [np.frombuffer(one[9], np.int8) for one in constants if one[2] == bytes([3])]

    assert len(matrices) == 24
    assert max(int(np.abs(matrix.astype(np.int16)).max()) for matrix in matrices) == 64


@pytest.mark.usefixtures("encoder_model")
def test_threads_share_one_encoder() -> None:
    with ThreadPoolExecutor(4) as threads:
        loaded = [*threads.map(lambda _: load_encoder(), range(8))]
        found = loaded[0]
        assert found is not None
        alone = found.encode(SENTENCES)
        together = [*threads.map(found.encode, [SENTENCES] * 8)]

    assert all(each is found for each in loaded)
    assert all(np.array_equal(alone, each) for each in together)


def test_the_encoder_name_depends_on_all_its_files(shipped: MiniLM) -> None:
    fingerprint = sha256("".join(FACTS["sha256"].values()).encode()).hexdigest()[:12]

    assert shipped.name == f"MiniLM-L6-tools-{fingerprint}"
    assert encoder_state() == f"words and meaning ({shipped.name})"
    assert encoder_name() == shipped.name


@pytest.mark.usefixtures("encoder_model")
@pytest.mark.parametrize("name", ["model.onnx", "pieces.npy", "vocabulary.txt", "encoder.json"])
def test_a_missing_file_leaves_word_search(home: Path, name: str) -> None:
    (home / name).unlink()

    assert load_encoder() is None
    assert encoder_state().startswith("words only: the encoder cannot be loaded (")
    assert name in encoder_state()


@pytest.mark.usefixtures("encoder_model")
@pytest.mark.parametrize("name", ["model.onnx", "vocabulary.txt"])
def test_a_changed_byte_leaves_word_search(home: Path, name: str) -> None:
    content = bytearray((home / name).read_bytes())
    content[len(content) // 2] ^= 1
    (home / name).write_bytes(content)

    assert load_encoder() is None
    assert encoder_state() == f"words only: the encoder cannot be loaded (`{name}` is damaged)"


@pytest.mark.usefixtures("encoder_model")
def test_a_truncated_table_leaves_word_search(home: Path) -> None:
    content = (home / "pieces.npy").read_bytes()
    (home / "pieces.npy").write_bytes(content[:-1])

    assert load_encoder() is None


@pytest.mark.usefixtures("encoder_model")
def test_a_table_of_another_shape_leaves_word_search(home: Path) -> None:
    rows = np.load(home / "pieces.npy")
    for other in (rows[:-1], rows["row"], np.zeros(len(rows)), rows[None]):
        encoder._load.cache_clear()
        np.save(home / "pieces.npy", other)

        assert load_encoder() is None
        assert "pieces.npy" in encoder_state()


@pytest.mark.usefixtures("encoder_model", "home")
def test_a_loading_error_is_reported_and_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def fail(home: Path) -> None:
        tried.append(home)
        raise RuntimeError

    monkeypatch.setattr(encoder, "MiniLM", fail)
    for _ in range(3):
        assert load_encoder() is None
        assert encoder_state() == "words only: the encoder cannot be loaded (RuntimeError())"
    assert len(tried) == 1


@pytest.mark.usefixtures("encoder_model")
def test_a_model_that_the_runtime_refuses_leaves_word_search(home: Path) -> None:
    (home / "model.onnx").write_bytes(b"of another time")
    facts = {**FACTS, "sha256": {**FACTS["sha256"], "model.onnx": sha256(b"of another time").hexdigest()}}
    (home / "encoder.json").write_text(json.dumps(facts), encoding="utf-8")

    assert load_encoder() is None
    assert "refuses it" in encoder_state()


@pytest.mark.usefixtures("encoder_model")
@pytest.mark.parametrize("facts", ["", "{}", "[]", '{"sha256": 3}', "\0"])
def test_invalid_metadata_leaves_word_search(home: Path, facts: str) -> None:
    (home / "encoder.json").write_text(facts, encoding="utf-8")

    assert load_encoder() is None


@pytest.mark.usefixtures("processes")
def test_without_the_runtime_search_uses_words() -> None:
    state = _python(
        "import sys",
        "sys.modules['onnxruntime'] = None",
        "from kiwi_mcp.search.encoder import encoder_state, load_encoder",
        "print(load_encoder(), encoder_state())",
    )

    assert state.startswith("None words only: import of onnxruntime halted")


@pytest.mark.usefixtures("processes")
def test_the_runtime_is_imported_when_the_encoder_is_loaded() -> None:
    imported = _python(
        "import sys",
        "from kiwi_mcp.search.encoder import encoder_name, load_encoder",
        "encoder_name()",
        "before = 'onnxruntime' in sys.modules",
        "load_encoder()",
        "print(before, 'onnxruntime' in sys.modules)",
    )

    assert imported == "False True\n"


@pytest.mark.usefixtures("processes", "encoder_model")
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_encoder_can_be_rebuilt(tmp_path: Path) -> None:
    _script("make_encoder.py", str(tmp_path / "made"))

    made = json.loads((tmp_path / "made" / "encoder.json").read_bytes())
    vectors = MiniLM(tmp_path / "made").encode(SENTENCES)
    assert made["weights_sha256"] == FACTS["weights_sha256"]
    assert all(made["sha256"][name] == FACTS["sha256"][name] for name in ("pieces.npy", "vocabulary.txt"))
    # As the published weights in full say.
    assert float(vectors[0] @ vectors[1]) == pytest.approx(0.694, abs=0.04)


@pytest.mark.usefixtures("processes", "encoder_model")
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_encoder_can_be_trained_and_rebuilt(tmp_path: Path) -> None:
    taught, homes = tmp_path / "taught.npz", (tmp_path / "published", tmp_path / "taught")
    data = str(ROOT / "benchmarks")
    lines = _script(
        "teach_encoder.py", "--data", data, "--steps", "13", str(taught), PYTHONPATH=data, OPENBLAS_NUM_THREADS="1"
    ).splitlines()
    for home, options in zip(homes, ([], ["--taught", str(taught)]), strict=True):
        _script("make_encoder.py", *options, str(home))
    before, after = (MiniLM(home).encode(SENTENCES) for home in homes)

    first, last = (float(re.findall(r"loss ([\d.]+)", line)[0]) for line in (lines[2], lines[-1]))
    assert last < 0.8 * first  # both are lessons with labels: those come in turns with others
    # So few steps change a little, and not what is near what.
    assert 0.001 < np.abs(before @ before.T - after @ after.T).max() < 0.2


def _script(name: str, *options: str, **environment: str) -> str:
    return subprocess.check_output(
        [sys.executable, str(ROOT / "scripts" / name), *options], timeout=290, text=True, env=os.environ | environment
    )


def _python(*lines: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=50, check=True
    )
    return run.stdout


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Give the fields of a message of protocol buffers, as far as ONNX files have them; numbers as their bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            at += 1
            if message[at - 1] < 0x80:
                return value
            shift += 7

    while at < len(message):
        key = varint()
        if key & 7 == 2:
            size = varint()
            at += size
            yield key >> 3, message[at - size : at]
        else:
            start = at
            varint()
            yield key >> 3, message[start:at]


@pytest.mark.usefixtures("processes")
def test_the_runtime_writes_and_sends_nothing_about_the_machine(tmp_path: Path) -> None:
    code = "from kiwi_mcp.search.encoder import load_encoder; load_encoder().encode(['a'])"
    home = tmp_path / "home"
    home.mkdir()
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", code], env=own, check=True, timeout=60)
    assert [*home.iterdir()] == []
