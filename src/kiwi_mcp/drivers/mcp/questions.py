"""What servers ask of whoever called them, in the protocol's own words: read, put, and answered."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, get_args

from kiwi_mcp.domain.caller import Answers, Question, QuestionMethod, Questions
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.drivers.mcp.talk import Talk

MOST_QUESTIONS = 32
"""The most questions that a server may ask at once."""
_METHODS: Final[Collection[str]] = frozenset(get_args(QuestionMethod))


def is_question(method: str) -> bool:
    """Whether a request of a server is one that its caller is asked."""
    return method in _METHODS


async def answered(asked: Json, talk: Talk) -> Answers:
    """Return the caller's answers to what a server wants to know, which it gives as `inputRequests`."""
    questions = _questions(as_object(asked))
    answers = await talk.ask(questions)
    return {key: with_defaults(question, answers[key]) for key, question in questions.items()}


async def answer_to(method: QuestionMethod, params: JsonObject, talk: Talk) -> JsonObject:
    """Return the caller's answer to the one question that a request of a server of the old era is."""
    question = Question(method, params)
    return with_defaults(question, (await talk.ask({method: question}))[method])


def question_method(method: str) -> QuestionMethod:
    """Return the word of a request as a question; others are refused."""
    match method:
        case "elicitation/create" | "sampling/createMessage" | "roots/list":
            return method
        case _:
            raise Unanswered([method], message=f"The server asks {method!r}, which is no question of this protocol.")


def with_defaults(question: Question, answer: JsonObject) -> JsonObject:
    """Return an answer in which a field of a form that was left out has the value that the form gives it."""
    if question.method != "elicitation/create" or answer.get("action") != "accept":
        return answer
    fields = as_object(as_object(question.params.get("requestedSchema")).get("properties"))
    given = {name: value["default"] for name, field in fields.items() if "default" in (value := as_object(field))}
    return {**answer, "content": {**given, **as_object(answer.get("content"))}} if given else answer


def _questions(asked: JsonObject) -> Questions:
    if len(asked) > MOST_QUESTIONS:
        methods = sorted({as_text(as_object(one).get("method")) for one in asked.values()})[:MOST_QUESTIONS]
        raise Unanswered(methods, message=f"The server asks {len(asked):,} questions at once.")
    found: dict[str, Question] = {}
    for key, one in asked.items():
        request = as_object(one)
        found[key] = Question(question_method(as_text(request.get("method"))), as_object(request.get("params")))
    return found
