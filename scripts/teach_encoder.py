"""Teaches the sentence encoder what requests and tools have to do with each other, in numpy, on processors alone.

Usage: teach_encoder.py [--data FOLDER] [--without SET,SET] [--steps N] WEIGHTS.npz

It begins with the weights of `make_encoder.py`, and learns by telling things apart: of all tools in a batch, which one
is a request for? There are two kinds of lessons, in turns. Half of them need no labels: what a tool says of itself goes
with its name and its parameters, and with what a tool of the same name says elsewhere. The other half are labelled
requests, each beside a tool that was easily mistaken for the right one. Every fourth request is left out, for judging
the result by.

The data is as `benchmarks/labelled.py` reads it. The result is for `make_encoder.py --taught`.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bert import Bert, Floats, Gradients
from kiwi_mcp.domain.cards import Card
from kiwi_mcp.search.encoder import MiniLM, WordPieces
from kiwi_mcp.search.index import passage_of
from kiwi_mcp.search.query import split_clauses
from kiwi_mcp.search.tokens import spelled
from labelled import OWN, Labelled, Listed, read_sets, union, where
from make_encoder import HEADS, PUBLISHED, download, write

STEPS: Final = 480
BATCH: Final = 48
RATE: Final = 3e-5
WARM_UP: Final = 20
TEMPERATURE: Final = np.float32(0.05)
LONGEST_REQUEST: Final = 40
LONGEST_PASSAGE: Final = 56
RIVALS: Final = 30
TOO_NEAR: Final = 0.85
"""Tools that are so near each other may both be right: neither is a wrong answer for what asks for the other."""
LEAST_WORDS: Final = 4
MEMORY: Final = (0.9, 0.98)
"""How much of the gradients so far, and of their squares, is kept in mind."""


class Lesson(NamedTuple):
    """Something that is asked, the tools that are right, and those that are easily mistaken for them."""

    request: str
    right: Sequence[int]
    rivals: Sequence[int]
    passage: str = ""
    """What the right tool is known by, if not by all it says."""


@dataclass(frozen=True)
class Tools:
    """All tools, what each says, and where it lay before anything was taught."""

    listed: Sequence[Listed]
    passages: Sequence[str]
    vectors: Floats

    @classmethod
    def of(cls, listed: Sequence[Listed], encoder: MiniLM) -> Tools:
        """Encode what tools say."""
        passages = [*map(_passage, listed)]
        return cls(listed, passages, encoder.encode(passages))


def main() -> None:
    """Teach, and write the weights."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("weights", type=Path, metavar="WEIGHTS.npz")
    options.add_argument("--data", metavar="FOLDER")
    options.add_argument(
        "--without", default="", metavar="SET,SET", help="learn nothing from the requests of these sets"
    )
    options.add_argument("--steps", type=int, default=STEPS)
    asked = options.parse_args()
    data = where(asked.data)
    if data == OWN and not asked.data:
        # Our own corpus is too small to learn from, and what ships would be the worse for it.
        raise SystemExit("The labelled data is not here: name its folder with --data, or in KIWI_DISCOVERY_DATA.")
    weights, vocabulary = download()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {"name": PUBLISHED}, weights, vocabulary)
        before = MiniLM(Path(folder))
        sets = read_sets(data)
        tools = Tools.of(union(sets), before)
        print(f"{len(tools.listed)} tools are read", flush=True)
        taught = [one for one in sets if one.name not in asked.without.split(",")]
        labelled = [lesson for one in taught for lesson in labelled_lessons(one, tools, before)]
    print(f"{len(labelled)} lessons have labels", flush=True)
    pupil = Bert(weights, HEADS)
    teach(pupil, tools, labelled, WordPieces(vocabulary.decode().split()), asked.steps)
    np.savez(asked.weights, **pupil.weights)  # type: ignore[arg-type]  # its other parameter is a flag of another name


def labelled_lessons(one: Labelled, tools: Tools, before: MiniLM) -> Iterator[Lesson]:
    """Give what can be learned from the requests of a set, and from the parts of those that ask for several things."""
    places = {tool.id: place for place, tool in enumerate(tools.listed)}
    own = np.array([places[tool.id] for tool in one.tools])
    for need in one.needs:
        right = [places[name] for name in sorted(need.gold) if name in places]
        if not right or need.is_left_out:
            continue
        yield _lesson(need.text, right, right, own, tools, before)
        parts = split_clauses(need.text) if len(right) > 1 else ()
        if parts:
            near = tools.vectors[right] @ before.encode(parts).T
            for row, tool in enumerate(right):
                part = int(near[row].argmax())
                if near[:, part].argmax() == row:  # each is the other's best: very likely it asks for this one
                    yield _lesson(parts[part], [tool], right, own, tools, before)


def _lesson(
    text: str, right: Sequence[int], spared: Sequence[int], own: NDArray[np.int64], tools: Tools, before: MiniLM
) -> Lesson:
    near = tools.vectors[own] @ before.encode([text])[0]
    rivals = [int(place) for place in own[np.argsort(-near)[: RIVALS + len(spared)]] if place not in spared]
    return Lesson(text, right, rivals)


def unlabelled_lessons(tools: Tools) -> list[Sequence[Lesson]]:
    """Return what tools say of themselves, as lessons; of those that stand together one is chosen each time."""
    named = defaultdict(list)
    for place, tool in enumerate(tools.listed):
        named[spelled(tool.name).lower()].append(place)
    found: list[Sequence[Lesson]] = []
    for place, tool in enumerate(tools.listed):
        if len(tool.description.split()) < LEAST_WORDS:
            continue
        first, *rest = re.split(r"(?<=[.!?])\s", tool.description, maxsplit=1)
        said = Listed("", tool.source, tool.name, " ".join(rest), tool.parameters)
        unnamed = Listed("", tool.source, "", tool.description, tool.parameters)
        found.append([Lesson(first, [place], [], _passage(said))])
        found.append([Lesson(spelled(tool.name), [place], [], _passage(unnamed))])
        namesakes = [
            other
            for other in named[spelled(tool.name).lower()]
            if tools.listed[other].source != tool.source and tools.vectors[place] @ tools.vectors[other] < TOO_NEAR
        ]
        if namesakes:
            found.append([Lesson(first, [other], []) for other in namesakes])
    return found


def teach(pupil: Bert, tools: Tools, labelled: Sequence[Lesson], pieces: WordPieces, steps: int) -> None:
    """Take so many steps, labelled and unlabelled in turns; each is smaller than the one before."""
    chance = Random(1)
    courses = [_shuffled(unlabelled_lessons(tools), chance)]
    if labelled:
        courses.insert(0, _shuffled([[lesson] for lesson in labelled], chance))
    learning = Learning(pupil.weights)
    began = time.monotonic()
    for step in range(1, steps + 1):
        course = courses[(step - 1) % len(courses)]
        loss, gradients = _judge(pupil, tools, [next(course) for _ in range(BATCH)], pieces, chance)
        learning.step(gradients, RATE * min(1, step / min(WARM_UP, steps / 4)) * max(0.05, 1 - step / steps))
        if step in {1, steps} or step % WARM_UP < len(courses):
            print(f"step {step}: loss {loss:.3f}, {time.monotonic() - began:.0f} s", flush=True)


def _shuffled(lessons: Sequence[Sequence[Lesson]], chance: Random) -> Iterator[Lesson]:
    """Give lessons without end, each once before any comes again."""
    while True:
        for place in chance.sample(range(len(lessons)), len(lessons)):
            yield chance.choice(lessons[place])


def _judge(
    pupil: Bert, tools: Tools, lessons: Sequence[Lesson], pieces: WordPieces, chance: Random
) -> tuple[float, Gradients]:
    """Return how badly requests and tools were told apart, and the gradients of that."""
    right = [chance.choice(lesson.right) for lesson in lessons]
    rivals = [chance.choice(lesson.rivals) for lesson in lessons if lesson.rivals]
    shown = [*right, *rivals]
    passages = [lesson.passage or tools.passages[place] for lesson, place in zip(lessons, right, strict=True)]
    passages += [tools.passages[place] for place in rivals]
    texts = [pieces.numbers(lesson.request, most=LONGEST_REQUEST) for lesson in lessons]
    texts += [pieces.numbers(passage, most=LONGEST_PASSAGE) for passage in passages]
    vectors, backwards = pupil.encode(texts)
    asked, offered = vectors[: len(lessons)], vectors[len(lessons) :]
    is_right = np.array([[place in lesson.right for place in shown] for lesson in lessons])
    is_shown = is_right | (tools.vectors[right] @ tools.vectors[shown].T < TOO_NEAR)
    near = asked @ offered.T
    loss, slope = _told_apart(near, is_right, is_shown)
    count = len(lessons)
    also, back = _told_apart(near[:, :count].T, is_right[:, :count].T, is_shown[:, :count].T)
    slope[:, :count] += np.float32(0.5) * back.T
    return loss + also / 2, backwards(np.concatenate([slope @ offered, slope.T @ asked]))


def _told_apart(near: Floats, is_right: NDArray[np.bool_], is_shown: NDArray[np.bool_]) -> tuple[float, Floats]:
    """Return minus the logarithm of the share that falls to what is right, and its gradient."""
    heat = np.where(is_shown, near / TEMPERATURE, -np.inf)
    heat -= heat.max(1, keepdims=True)
    every = np.exp(heat)
    good = every * is_right
    shares, wanted = every / every.sum(1, keepdims=True), good / good.sum(1, keepdims=True)
    loss = float(np.log(every.sum(1) / good.sum(1)).mean())
    return loss, ((shares - wanted) / (TEMPERATURE * len(near))).astype(np.float32)


class Learning:
    """Adam: each weight moves by its gradient, measured by how large that usually is."""

    def __init__(self, weights: dict[str, Floats]) -> None:
        self._weights = weights
        self._means: dict[str, Floats] = {}
        self._squares: dict[str, Floats] = {}
        self._steps = 0

    def step(self, gradients: Mapping[str, Floats], rate: float) -> None:
        """Move all weights by a step, whose length has a limit."""
        self._steps += 1
        length = float(np.sqrt(sum(float((gradient * gradient).sum()) for gradient in gradients.values())))
        keep, keep_square = MEMORY
        for name, gradient in gradients.items():
            short = gradient * np.float32(min(1, 1 / length))
            mean = self._means.setdefault(name, np.zeros_like(short))
            square = self._squares.setdefault(name, np.zeros_like(short))
            mean += np.float32(1 - keep) * (short - mean)
            square += np.float32(1 - keep_square) * (short * short - square)
            usual = np.sqrt(square / np.float32(1 - keep_square**self._steps)) + np.float32(1e-8)
            self._weights[name] -= np.float32(rate / (1 - keep**self._steps)) * mean / usual


def _passage(tool: Listed) -> str:
    card = Card(
        source="mcp",
        namespace=tool.source,
        tool_id=tool.name,
        description=tool.description,
        parameters=tuple(tool.parameters.items()),
        server=tool.source,
    )
    return passage_of(card)


if __name__ == "__main__":
    main()
