"""Addresses that a person is asked to open, shown on standard error, and opened where there is a window for them."""

from __future__ import annotations

import asyncio
import sys

from kiwi_mcp.domain.caller import Answers, Questions
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.primitives import browser
from kiwi_mcp.surfaces.cli.screen import talk


async def shown_address(questions: Questions) -> Answers:
    """Show the address of each question."""
    for question in questions.values():
        if question.method != "elicitation/create" or question.params.get("mode") != "url":
            raise Unanswered([question.method])
        talk(f"{as_text(question.params.get('message'))}\n\n{as_text(question.params.get('url'))}\n")
    return {key: {"action": "accept"} for key in questions}


async def opened_address(questions: Questions) -> Answers:
    """Show the address of each question, and open it where a person sits at this machine."""
    answers = await shown_address(questions)
    if sys.stderr.isatty():
        for question in questions.values():
            await asyncio.to_thread(browser.open_address, as_text(question.params.get("url")))
    return answers
