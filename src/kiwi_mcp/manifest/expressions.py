"""Expressions of hooks and steps: text to a tree, once; the tree to a value, without calls and without exceptions.

    expression = and {"or" and};  and = not {"and" not};  not = "not" not | comparison
    comparison = sum [("==" | "!=" | "<" | ">" | "<=" | ">=" | "in" | "not in") sum]
    sum = product {("+" | "-") product};  product = value {("*" | "/") value}
    value = number | string | true | false | null | path | list | "-" value | "(" expression ")"

A missing path is null, ordering with null is false, null counts as 0 in arithmetic, and x / 0 is 0.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeAlias

from msgspec import Struct

from kiwi_mcp.domain.json import Json, JsonObject, as_list
from kiwi_mcp.domain.patterns import lazy_pattern

MAX_LENGTH = 2_000
MAX_DEPTH = 32

_TOKEN = lazy_pattern(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<word>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)|(?P<sign>==|!=|<=|>=|[<>+*/()\[\],-]))"""
)
_CONSTANTS: Mapping[str, Json] = {"true": True, "false": False, "null": None}
_KEYWORDS = {"or", "and", "not", "in"}
_ORDER: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_COMPUTED: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right if right else 0,
}
_COMPARISONS = {"==", "!=", "in", "not in", *_ORDER}
_MAX_NUMBER = 1e300


class ExpressionFault(Exception):
    """Why a text is no expression."""


class Constant(Struct, frozen=True):
    """A value that is written out."""

    value: Json


class DottedPath(Struct, frozen=True):
    """Names that lead to a value."""

    names: tuple[str, ...]


class Applied(Struct, frozen=True):
    """An operator and its operands; `list` makes a list of them."""

    sign: str
    operands: tuple[Expression, ...]


Expression: TypeAlias = Constant | DottedPath | Applied


@lru_cache(maxsize=1_024)
def compiled(text: str) -> Expression:
    """Return the tree of an expression; raise `ExpressionFault` with what is wrong with it."""
    if not text.strip():
        raise ExpressionFault("it is empty")
    if len(text) > MAX_LENGTH:
        raise ExpressionFault(f"it is longer than {MAX_LENGTH} characters")
    return _Parser(text).whole()


def is_true(expression: Expression, context: JsonObject) -> bool:
    """Return whether an expression holds in a context."""
    return bool(evaluate(expression, context))


def evaluate(expression: Expression, context: JsonObject) -> Json:
    """Return the value of an expression in a context."""
    match expression:
        case Constant(value):
            return value
        case DottedPath(names):
            return at_path(context, names)
        case Applied("or", operands):
            return any(is_true(one, context) for one in operands)
        case Applied("and", operands):
            return all(is_true(one, context) for one in operands)
        case Applied(sign, operands):
            return _applied(sign, [evaluate(one, context) for one in operands])


def at_path(context: JsonObject, names: tuple[str, ...]) -> Json:
    """Return what a path leads to; null where it leads nowhere."""
    here: Json = context
    for name in names:
        if isinstance(here, Mapping):
            here = here.get(name)
        elif name.isdigit() and int(name) < len(as_list(here)):
            here = as_list(here)[int(name)]
        else:
            return None
    return here


def is_equal(left: Json, right: Json) -> bool:
    """Whether two values are the same; a number is never a truth value."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def is_ordered(sign: str, left: Json, right: Json) -> bool:
    """Whether two numbers or two texts are in this order; false for everything else."""
    match left, right:
        case (bool(), _) | (_, bool()):
            return False
        case (int() | float() as first, int() | float() as second):
            return _ORDER[sign](first, second)
        case (str() as first_text, str() as second_text):
            ranks = (1, 0) if first_text > second_text else (0, int(first_text != second_text))
            return _ORDER[sign](*ranks)
    return False


def is_within(value: Json, whole: Json) -> bool:
    """Whether a value is in a list, a key of a mapping, or a part of a text."""
    if isinstance(whole, str | Mapping):
        return isinstance(value, str) and value in whole
    return any(is_equal(value, one) for one in as_list(whole))


def _applied(sign: str, values: list[Json]) -> Json:
    match sign, values:
        case "list", _:
            return values
        case "not", [value]:
            return not value
        case "negative", [value]:
            return -_number(value)
        case "==", [left, right]:
            return is_equal(left, right)
        case "!=", [left, right]:
            return not is_equal(left, right)
        case "in", [left, right]:
            return is_within(left, right)
        case "not in", [left, right]:
            return not is_within(left, right)
        case "+", [str() as left, str() as right]:
            return left + right
        case _, [left, right] if sign in _ORDER:
            return is_ordered(sign, left, right)
        case _, [left, right]:
            return _number(_COMPUTED[sign](_number(left), _number(right)))
    return None


def _number(value: Json) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    return value if abs(value) < _MAX_NUMBER else 0


class _Parser:
    """One pass over the tokens of an expression."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        self._at = 0
        self._depth = 0
        at, end = 0, len(text.rstrip())
        while at < end:
            token = _TOKEN.match(text, at)
            if token is None:
                raise ExpressionFault(f"{text[at : at + 20].strip()!r} is not understood")
            self._tokens.append(token[0].strip())
            at = token.end()

    def whole(self) -> Expression:
        found = self._any()
        if self._at < len(self._tokens):
            raise ExpressionFault(f"{self._next()!r} is one word too many")
        return found

    def _any(self) -> Expression:
        return self._deeper(lambda: self._joined("or", lambda: self._joined("and", self._negated)))

    def _deeper(self, part: Callable[[], Expression]) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionFault(f"it is nested more than {MAX_DEPTH} deep")
        found = part()
        self._depth -= 1
        return found

    def _joined(self, word: str, part: Callable[[], Expression]) -> Expression:
        parts = [part()]
        while self._takes(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Applied(word, tuple(parts))

    def _negated(self) -> Expression:
        count = 0
        while self._takes("not"):
            count += 1
        found = self._comparison()
        for _ in range(count if count < 2 else 2 - count % 2):  # noqa: PLR2004 - two negations leave a truth value
            found = Applied("not", (found,))
        return found

    def _sum(self) -> Expression:
        return self._chained(("+", "-"), lambda: self._chained(("*", "/"), self._value))

    def _comparison(self) -> Expression:
        left, sign = self._sum(), self._peek()
        if sign == "not" and self._peek(1) == "in":
            self._at += 1
            sign = "not in"
        if sign not in _COMPARISONS:
            return left
        self._at += 1
        right = self._sum()
        if self._peek() in _COMPARISONS:
            raise ExpressionFault("two comparisons stand in a row; join them with `and`")
        return Applied(sign, (left, right))

    def _chained(self, signs: tuple[str, ...], part: Callable[[], Expression]) -> Expression:
        found, length = part(), 0
        while (sign := self._peek()) in signs:
            self._at, length = self._at + 1, length + 1
            if length > MAX_DEPTH:
                raise ExpressionFault(f"it has more than {MAX_DEPTH} operations in a row")
            found = Applied(sign, (found, part()))
        return found

    def _value(self) -> Expression:
        word = self._next()
        if word == "(":
            found = self._any()
            self._expect(")")
            return found
        if word == "[":
            items: list[Expression] = []
            while not self._takes("]"):
                if items:
                    self._expect(",")
                items.append(self._any())
            return Applied("list", tuple(items))
        if word == "-":
            return self._deeper(lambda: Applied("negative", (self._value(),)))
        if word[0] in "\"'":
            return Constant(re.sub(r"\\(.)", r"\1", word[1:-1], flags=re.DOTALL))
        if word[0].isdigit():
            return Constant(float(word) if "." in word else int(word))
        if word in _CONSTANTS:
            return Constant(_CONSTANTS[word])
        if word in _KEYWORDS or not (word[0].isalpha() or word[0] == "_"):
            raise ExpressionFault(f"{word!r} stands where a value belongs")
        if self._peek() == "(":
            raise ExpressionFault(f"`{word}(` would be a call, and expressions have none")
        return DottedPath(tuple(word.split(".")))

    def _peek(self, ahead: int = 0) -> str:
        place = self._at + ahead
        return self._tokens[place] if place < len(self._tokens) else ""

    def _next(self) -> str:
        if not (token := self._peek()):
            raise ExpressionFault("it ends where a value belongs")
        self._at += 1
        return token

    def _takes(self, token: str) -> bool:
        is_there = self._peek() == token
        self._at += is_there
        return is_there

    def _expect(self, token: str) -> None:
        if not self._takes(token):
            raise ExpressionFault(f"`{token}` is missing" + (f" before {self._peek()!r}" if self._peek() else ""))
