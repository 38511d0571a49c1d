"""What remembering is worth: search that knows the requests after which tools were used before, on a simulated history.

Usage: learning.py [--data FOLDER] [--dataset NAME] [--limit N] [--words]

The requests of a set are dealt out, those for the same tool to different hands. Each hand is asked about in turn, while
some of the others' requests are remembered for the tools that they are for: none, 1, 3 or 10 of each tool. What answers
is what the verb `search` answers with. Without `--dataset` it is the set that has the most requests for each tool.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.trace import Trace
from kiwi_mcp.search.encoder import load_encoder
from kiwi_mcp.search.index import Index
from kiwi_mcp.search.memory import Memory, item_of
from kiwi_mcp.search.port import Card, Encoder
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.search.request import Request, read_request
from kiwi_mcp.search.sheet import pack_vectors
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.sheets import Sheets
from labelled import OWN, ROOT, TOP, Labelled, Listed, Need, mean, read_sets, scores, where

REMEMBERED = (0, 1, 3, 10)
SHOWN = ("nDCG@10", "R@1", "R@5")
_HANDS = 5
_LONGEST = 300
_KEEP = ROOT / ".cache" / "discovery.db"
_HEAD = """\
## Learning from use

`benchmarks/learning.py`: what it is worth to remember the requests after which tools were used. A history is simulated:
other requests for the same tools are remembered, at most so many of each ({dataset}, {needs:,} requests for {tools:,}
tools). Per cent, means over requests.

| remembered of a tool | """


@dataclass(frozen=True, slots=True)
class History:
    """Tools that can be searched, and requests for them, read and dealt out."""

    index: Index
    needs: Sequence[Need]
    requests: Sequence[Request]
    hands: Sequence[int]
    encoder: str

    def asked(self, most: int) -> Mapping[str, float]:
        """Return how well all requests are answered while at most so many others are remembered of each tool."""
        rows = [row for hand in range(_HANDS) for row in self._hand(hand, most)]
        return mean(rows)

    def _hand(self, hand: int, most: int) -> Iterator[Mapping[str, float]]:
        traces = [*self._remembered(hand, most)]
        memory = Memory(traces, self.encoder) if traces else None
        for need, request, dealt in zip(self.needs, self.requests, self.hands, strict=True):
            if dealt == hand:
                recall = memory.recall(request) if memory else None
                hits = rank(request, [self.index], limit=TOP, recall=recall).hits
                yield scores([hit.card.path for hit in hits], need.gold)

    def _remembered(self, hand: int, most: int) -> Iterator[Trace]:
        known: dict[str, int] = {}
        order = [number for number, dealt in enumerate(self.hands) if dealt != hand]
        random.Random(hand).shuffle(order)
        for number in order:
            need, request = self.needs[number], self.requests[number]
            vector = pack_vectors(request.vectors[:1])[0] if request.vectors is not None else b""
            for tool in sorted(need.gold):
                known[tool] = known.get(tool, 0) + 1
                if known[tool] <= most:
                    yield Trace(item_of(_identity(tool)), need.text[:_LONGEST], True, number, "", self.encoder, vector)


def history(one: Labelled, encoder: Encoder | None, keep: Path | None = None) -> History:
    """Return a set as something that can be asked; what is made of the texts of its tools is kept, if anywhere."""
    index = Index(encoder.name if encoder else "")
    index.follow(tuple(map(_card, one.tools)))
    with ExitStack() as stack:
        if keep:
            keep.parent.mkdir(parents=True, exist_ok=True)
        sheets = Sheets(stack.enter_context(closing(open_database(f"sqlite://{keep}")))) if keep else None
        while index.catch_up(sheets, encoder, seconds=60):
            pass
    dealt: dict[str, int] = {}
    hands = []
    for need in one.needs:
        first = min(need.gold)
        dealt[first] = dealt.get(first, -1) + 1
        hands.append(dealt[first] % _HANDS)
    requests = [read_request(need.text, encoder) for need in one.needs]
    return History(index, one.needs, requests, hands, encoder.name if encoder else "")


def report(asked: argparse.Namespace, *, is_page: bool = False) -> str:
    """Return the section on what was asked for; a page does not name the set."""
    folder = where(asked.data)
    one = chosen(read_sets(folder, limit=asked.limit), asked.dataset)
    named = "the small corpus in `benchmarks/corpus`" if folder == OWN else "one set" if is_page else one.name
    return table(one, None if asked.words else load_encoder(), named, _KEEP)


def table(one: Labelled, encoder: Encoder | None, named: str, keep: Path | None = None) -> str:
    """Return what remembering is worth on a set, by words only and by default."""
    halves = {"words only": None} | ({"default": encoder} if encoder else {})
    known = [history(one, half, keep) for half in halves.values()]
    wanted = len({tool for need in one.needs for tool in need.gold})
    head = _HEAD.format(dataset=named, needs=len(one.needs), tools=wanted)
    columns = [f"{half}: {metric}" for half in halves for metric in SHOWN]
    lines = [head + " | ".join(columns) + " |", f"| --- |{' --- |' * len(columns)}"]
    for most in REMEMBERED:
        found = [each.asked(most) for each in known]
        lines.append(
            f"| {most} | " + " | ".join(f"{row[metric] * 100:.1f}" for row in found for metric in SHOWN) + " |"
        )
    return "\n".join(lines) + "\n"


def chosen(sets: Sequence[Labelled], named: str | None) -> Labelled:
    """Return the set of a name, else the one that has the most requests for each tool."""
    asked = [one for one in sets if one.needs and named in {None, one.name}]
    if not asked:
        raise SystemExit(f"There is no set {named} with requests")
    return max(asked, key=lambda one: len(one.needs) / len({min(need.gold) for need in one.needs}))


def _identity(tool: str) -> str:
    return f"mcp/{tool.replace('@', '-')}@1"


def _card(tool: Listed) -> Card:
    return Card(
        identity=_identity(tool.id),
        tool_id=tool.name,
        description=tool.description,
        parameters=tuple(tool.parameters.items()),
        source="mcp",
        path=tool.id,
        namespace=tool.source,
        server=tool.source,
    )


def options() -> argparse.ArgumentParser:
    """Return what can be asked for."""
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--data", metavar="FOLDER", help="the labelled data")
    known.add_argument("--dataset", metavar="NAME", help="the set")
    known.add_argument("--limit", type=int, metavar="N", help="only so many requests")
    known.add_argument("--words", action="store_true", help="compare words only")
    return known


def main() -> None:
    """Print what was asked for."""
    print(report(options().parse_args()))


if __name__ == "__main__":
    main()
