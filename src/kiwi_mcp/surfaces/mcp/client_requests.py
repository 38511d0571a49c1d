"""Elicitation, sampling, roots: may the client be asked, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Final

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kiwi_mcp.domain.calls import Answers, Question, QuestionMethod, Questions
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.surfaces.mcp.protocol import Context, left

PATIENCE = 600.0
"""How long a person, or their model, may take for one answer, in seconds."""
_TOLD = 500

_REQUESTS: Final[Mapping[QuestionMethod, TypeAdapter[types.InputRequest]]] = {
    "elicitation/create": TypeAdapter(types.ElicitRequest),
    "sampling/createMessage": TypeAdapter(types.CreateMessageRequest),
    "roots/list": TypeAdapter(types.ListRootsRequest),
}
_ANSWERS: Final[Mapping[QuestionMethod, TypeAdapter[types.InputResponse]]] = {
    "elicitation/create": TypeAdapter(types.ElicitResult),
    "sampling/createMessage": TypeAdapter(types.CreateMessageResult | types.CreateMessageResultWithTools),
    "roots/list": TypeAdapter(types.ListRootsResult),
}


class _AsItIs(BaseModel):
    """Any object, nothing of it lost."""

    model_config = ConfigDict(extra="allow")


def askable(capabilities: types.ClientCapabilities | None) -> JsonObject:
    """Return what of a client's capabilities is about questions."""
    if capabilities is None or not (capabilities.elicitation or capabilities.sampling or capabilities.roots):
        return {}
    response = capabilities.model_dump(
        by_alias=True, mode="json", exclude_none=True, include={"elicitation", "sampling"}
    )
    # Changes of the roots are announced only to the direct peer of the client, and to no server behind it.
    return {**response, "roots": {}} if capabilities.roots is not None else response


def refuse_unaskable(questions: Questions, capabilities: JsonObject) -> None:
    """Refuse questions that a client did not say it can be asked, or that MCP does not know in this form."""
    lacking = {name for question in questions.values() if (name := _lacking(question, capabilities))}
    if lacking:
        raise Unanswered(
            sorted({question.method for question in questions.values()}),
            message=f"The tool asks a question, and this client cannot be asked: it does not declare "
            f"{', '.join(f'`{name}`' for name in sorted(lacking))}.",
        )
    for question in questions.values():
        as_request(question)


def as_request(question: Question) -> types.InputRequest:
    """Return a question as the request that MCP has for it."""
    try:
        return _REQUESTS[question.method].validate_python({"method": question.method, "params": question.params})
    except ValidationError as error:
        raise Unanswered(
            [question.method],
            message=f"The tool asks a question in a form that MCP does not have ({question.method}): "
            f"{error.errors()[0]['msg']}."[:_TOLD],
            suggestion="Tell the author of the tool.",
        ) from error


def is_answer(question: Question, answer: object) -> bool:
    """Whether something answers a question, by its form."""
    try:
        _ANSWERS[question.method].validate_python(answer, by_name=False)
    except ValidationError:
        return False
    return True


async def ask_client(context: Context, questions: Questions) -> Answers:
    """Ask a client of the era of handshakes, one question after the other, on the connection that its call came by."""
    refuse_unaskable(questions, askable(context.session.client_capabilities))
    return {key: await _asked(context, question) for key, question in questions.items()}


async def _asked(context: Context, question: Question) -> JsonObject:
    sending = context.session.send_request(
        as_request(question),
        _AsItIs,
        request_read_timeout_seconds=PATIENCE,
        metadata=ServerMessageMetadata(related_request_id=context.request_id),
    )
    try:
        answer = await _while_there(context, sending, question)
    except MCPError as refusal:
        raise Unanswered(
            [question.method], message=f"The client did not answer the tool's question: {refusal.message[:_TOLD]}"
        ) from refusal
    except ValidationError as error:
        raise Unanswered(
            [question.method], message="What the client said to the tool's question is not an answer to it."
        ) from error
    said: JsonObject = answer.model_dump(mode="json")
    return said


async def _while_there(context: Context, sending: Awaitable[_AsItIs], question: Question) -> _AsItIs:
    """Wait for an answer for as long as the client waits for its call: over HTTP, one that left cannot answer."""
    if (is_left := left(context)) is None:
        return await sending
    answering, leaving = asyncio.ensure_future(sending), asyncio.ensure_future(is_left.wait())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Unanswered([question.method], message="The client left before it answered the tool's question.")
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


def _lacking(question: Question, capabilities: JsonObject) -> str:
    """Return the capability that a client would need to be asked, empty where it has that."""
    match question.method:
        case "elicitation/create":
            mode = "url" if question.params.get("mode") == "url" else "form"
            declared = as_object(capabilities.get("elicitation"))
            # An empty declaration is older than the modes, and means forms.
            is_able = "elicitation" in capabilities and (mode in declared or (mode == "form" and not declared))
            return "" if is_able else f"elicitation.{mode}"
        case "sampling/createMessage":
            if "sampling" not in capabilities:
                return "sampling"
            wants_tools = question.params.get("tools") or question.params.get("toolChoice")
            return "sampling.tools" if wants_tools and "tools" not in as_object(capabilities["sampling"]) else ""
        case "roots/list":
            return "" if "roots" in capabilities else "roots"
