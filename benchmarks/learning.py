"""What remembering is worth: search that knows the requests after which tools were used before, on simulated histories.

Usage: learning.py [--data FOLDER] [--dataset NAME] [--limit N] [--words]

The requests of a set are dealt out, those for the same tool to different hands. Each hand is asked about in turn, while
some of the others' requests are remembered for the tools that they are for: none, 1, 3 or 10 of each tool. In a last
history all are, but for those of the tools that the hand asks for. What answers is the verb `search`, and what is used
is told to the memory that a run tells (`discovery_adapter.py`). Only requests that the encoder was not taught with are
asked; any may be remembered. Without `--dataset` it is each set that has several requests for many of its tools, or the
one that has the most.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finders import DEFAULT, WORDS, Finder, started
from labelled import OWN, ROOT, Labelled, Need, mean, read_sets, scores, where, write_tools

REMEMBERED = (0, 1, 3, 10)
SHOWN = ("nDCG@10", "R@1", "R@5")
_HANDS = 5
_OFTEN = 1.4
"""From how many requests a tool on a set tells what is learnt from them."""
_KEEP = ROOT / ".cache" / "discovery.db"
_HEAD = """\
## Learning from use

`benchmarks/learning.py`: what it is worth to remember the requests after which tools were used. A history is simulated:
other requests for the same tools are remembered, at most so many of each; in the last, all requests that are for other
tools. nDCG@10 / R@1 / R@5, per cent, means over the requests that the encoder was not taught with; what is remembered
may be any.

"""


@dataclass(frozen=True, slots=True)
class History:
    """Requests, dealt out, and who answers them."""

    needs: Sequence[Need]
    finder: Finder
    is_taught: bool = True
    """Whether the encoder was taught with all requests but those that are left out, so that it is judged by these."""

    def asked(self, most: int, *, is_foreign: bool = False) -> Mapping[str, float]:
        """Return how well all requests are answered while at most so many others are remembered of each tool.

        Where those are foreign, none of them is for a tool that is asked for.
        """
        hands = dealt(self.needs)
        rows = [row for hand in range(_HANDS) for row in self._hand(hands, hand, most, is_foreign=is_foreign)]
        if not rows:
            raise SystemExit("The encoder was taught with each of these requests: ask more of them")
        return mean(rows)

    def _hand(self, hands: Sequence[int], hand: int, most: int, *, is_foreign: bool) -> Iterator[Mapping[str, float]]:
        dealt_out = [need for need, one in zip(self.needs, hands, strict=True) if one == hand]
        mine = [need for need in dealt_out if need.is_left_out or not self.is_taught]
        others = [need for need, one in zip(self.needs, hands, strict=True) if one != hand]
        without = frozenset(tool for need in mine for tool in need.gold) if is_foreign else frozenset[str]()
        self.finder.tell({"forget": True})
        for tool, request in remembered(others, most, hand, without):
            self.finder.tell({"used": tool, "query": request})
        for need in mine:
            yield scores(self.finder.ask(need.text), need.gold)


def dealt(needs: Sequence[Need]) -> Sequence[int]:
    """Return the hand that each request is dealt to."""
    counts: dict[str, int] = {}
    hands = []
    for need in needs:
        first = min(need.gold)
        counts[first] = counts.get(first, -1) + 1
        hands.append(counts[first] % _HANDS)
    return hands


def remembered(needs: Sequence[Need], most: int, seed: int, without: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Give tools with requests that they were used after, at most so many of each."""
    known: dict[str, int] = {}
    for need in random.Random(seed).sample(needs, len(needs)):
        for tool in sorted(need.gold - without):
            known[tool] = known.get(tool, 0) + 1
            if known[tool] <= most:
                yield tool, need.text


def report(asked: argparse.Namespace, *, is_page: bool = False) -> str:
    """Return the section on what was asked for; a page does not name the sets."""
    folder = where(asked.data)
    names = [WORDS] if asked.words else [WORDS, DEFAULT]
    sets = chosen(read_sets(folder, limit=asked.limit), asked.dataset)
    called = [f"set {number}" if is_page else one.name for number, one in enumerate(sets, 1)]
    own = "The labelled data is not here: this is the small corpus in `benchmarks/corpus`.\n\n" if folder == OWN else ""
    # The encoder has seen no request of our own corpus.
    return _HEAD + own + table(dict(zip(called, sets, strict=True)), names, is_taught=folder != OWN)


def table(sets: Mapping[str, Labelled], names: Sequence[str], *, is_taught: bool) -> str:
    """Return what remembering is worth on some sets."""
    columns = ["set", "requests a tool", "finder", *map(str, REMEMBERED), "of other tools"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for called, one in sets.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tools.jsonl")
            write_tools(path, one.tools)
            for name in names:
                with started([name], path, keep=_KEEP) as (finder,):
                    history = History(one.needs, finder, is_taught)
                    found = [history.asked(most) for most in REMEMBERED]
                    found.append(history.asked(REMEMBERED[-1], is_foreign=True))
                figures = " | ".join(" / ".join(f"{row[metric] * 100:.1f}" for metric in SHOWN) for row in found)
                lines.append(f"| {called} | {_per_tool(one):.1f} | {name} | {figures} |")
    return "\n".join(lines) + "\n"


def chosen(sets: Sequence[Labelled], named: str | None) -> Sequence[Labelled]:
    """Return the set of a name, else those that have several requests for each tool, or the one that has the most."""
    asked = [one for one in sets if one.needs and named in {None, one.name}]
    if not asked:
        raise SystemExit(f"There is no set {named} with requests")
    often = [one for one in asked if named or _per_tool(one) >= _OFTEN]
    return often or [max(asked, key=_per_tool)]


def _per_tool(one: Labelled) -> float:
    wanted = [tool for need in one.needs for tool in need.gold]
    return len(wanted) / len({*wanted})


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
