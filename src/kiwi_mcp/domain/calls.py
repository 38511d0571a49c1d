"""Calls: the folders, the request, the caller, and the questions to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, get_args

from msgspec import Struct, field

from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.grants import Grant
from kiwi_mcp.domain.items import DEFAULT_SOURCES, ItemType
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome, Report, silent
from kiwi_mcp.domain.records import LIFETIME_MS
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.domain.threads import ThreadObserver, unobserved

IdentityKind = Literal["owner", "agent", "service", "thread"]
"""The owner, an agent or a person that works for the owner, a program, or a thread that Kiwi runs."""
IDENTITY_KINDS: tuple[IdentityKind, ...] = get_args(IdentityKind)
QuestionMethod = Literal["elicitation/create", "sampling/createMessage", "roots/list"]
"""The kinds of questions: input or a decision of the owner, a completion of the model, the folders of the client."""
Answers: TypeAlias = Mapping[str, JsonObject]
"""An answer to each question, under the same keys, in MCP format: `{"action": "accept", "content": {…}}`."""
Note: TypeAlias = Callable[[JsonObject], None]
"""Takes one line that a tool logs, as MCP has it: `level`, `data`, perhaps `logger`. It must not block."""


class Space(Struct, frozen=True):
    """The folders that a call uses: a project, the user's own, the memory, and a cache for derived files."""

    project: Path
    user: Path
    cache: Path
    memory_root: str = ""
    """The folder with the memory; empty for `memory` in the user's own."""
    sources: tuple[str, ...] = DEFAULT_SOURCES
    """The sources of items, of which some are folders of the project."""

    @property
    def memory(self) -> Path:
        """The folder with the memory."""
        return Path(self.memory_root) if self.memory_root else self.user / "memory"

    @property
    def project_ai(self) -> Path:
        """The project's `.ai` folder."""
        return self.project / ".ai"

    def folder(self, source: Literal["project", "user"]) -> Path:
        """Return the `.ai` folder with the project's items, or with the user's."""
        return {"project": self.project_ai, "user": self.user}[source]


class CallOrigin(Struct, frozen=True):
    """The thread that made a call: its id, the key of the call in it, and the nesting depth."""

    thread: str = ""
    key: str = ""
    depth: int = 0
    repeats: str = ""
    """The run that this call repeats, because its process died before it ended."""
    path: str = ""
    """The names of the threads from the root to this one."""
    directive: str = ""
    """The digest of its directive."""
    lease: int = 0
    """The lease of the process that runs it: with an older one nothing can be appended."""
    run: str = ""
    """The run of the item that makes this call, such as a program or a tool that calls others."""
    tools: int = 0
    """How many tools stand above a call that a tool makes."""


PERSON = CallOrigin()
"""The origin of a call that no thread made."""


class Call(Struct, frozen=True):
    """One request to run an item: its reference and its parameters."""

    tool_id: str
    space: Space
    parameters: JsonObject = field(default_factory=dict)
    is_frozen: bool = False
    """Whether a chain that differs from the lockfile is refused instead of reported."""
    item_type: ItemType | None = None
    """Which type of item is meant; None means the one that the name resolves to."""
    has_checkpoint: bool = False
    """Whether the caller asks for a checkpoint: then nothing runs without one."""
    origin: CallOrigin = PERSON
    run_id: str = ""
    """The id that was reserved for the run; empty where the run gets a new one."""


class Served(Struct, frozen=True):
    """A kernel that is asked by others than its owner; about one project, or about any where `project` is None."""

    project: Path | None


class CallJournal(Protocol):
    """Notes the beginning and the end of one call of a thread; `transaction` is that of the store."""

    def began(self, transaction: object, run_id: str, effect: str) -> None:
        """Note that the call begins; raises where another process has taken the thread."""

    def confirm(self) -> None:
        """Raise if this process was stopped since the call began, and another one has taken the thread."""

    def ended(self, transaction: object, run_id: str, outcome: Outcome, response: JsonObject) -> None:
        """Note what came of it; `response` has the result as it is shown."""


class Principal(Struct, frozen=True):
    """Who acts: a kind, and the name that rules call them by."""

    kind: IdentityKind
    name: str


OWNER = Principal("owner", "")
"""The user who started Kiwi. Only the rules for all principals apply to them."""
STRANGER = Principal("agent", "")
"""An unknown principal."""


class Question(Struct, frozen=True):
    """One question that a call must have answered, in MCP format, so that it is passed on unchanged."""

    method: QuestionMethod
    params: JsonObject
    is_own: bool = False
    """Whether Kiwi itself asks. Such a question cannot have an answer before it is asked."""


Questions: TypeAlias = Mapping[str, Question]
"""Questions that are asked together, each under a key."""
Ask: TypeAlias = Callable[[Questions], Awaitable[Answers]]
"""Asks and waits for every answer; a question that cannot be asked raises `Unanswered`."""


async def no_answers(questions: Questions) -> Answers:
    """Refuse to answer: there is no one to ask."""
    raise Unanswered(sorted({question.method for question in questions.values()}))


def unheard(_: JsonObject) -> None:
    """Discard a log line."""


class Caller(Struct, frozen=True):
    """The party that waits for the result of a call."""

    report: Report = silent
    ask: Ask = no_answers
    note: Note = unheard
    observe: ThreadObserver = unobserved
    """Takes the events of a thread that it starts, continues or watches."""
    capabilities: JsonObject = field(default_factory=dict)
    """What it can be asked, as MCP's clients declare it: `elicitation`, `sampling`, `roots`."""
    is_owner: bool = False
    """Whether its answers are those of the owner, so that it may approve plans."""
    name: str = ""
    """The caller's name if it is not the owner of the store. Its runs are recorded under this name."""
    identity: Principal = OWNER
    """The principal that rules apply to."""
    can_author: bool = False
    """Whether it may change items, where a kernel serves others than its owner."""
    actor: Actor | None = None
    """The user of the registry that it is, where a kernel serves others than its owner; None sees public items only."""
    can_write: bool = False
    """Whether it may change the registry, where a kernel serves others than its owner."""
    is_direct: bool = False
    """Whether a program sends this to the gateway's API, and no model does over MCP."""
    can_manage: bool = False
    """Whether its token may call the verbs of the owner, where the call is direct."""
    client: str = ""
    """The name that the calling program reports; no decision depends on it."""
    expires_at: float | None = None
    """When what it showed to the gateway ends by itself, in seconds since 1970."""
    served: Served | None = None
    """For the calls of a thread that a caller of a gateway started: how that gateway serves."""
    origin: CallOrigin = PERSON
    """The thread that calls, if one does. Only Kiwi's own agent loop sets it; a request cannot."""
    grants: tuple[Grant, ...] = ()
    """Grants that narrow the rights of the principal: those of the directives of a thread and of its parents."""
    journal: CallJournal | None = None
    """Where a thread notes how its call begins and ends, in the transaction that records the run."""
    answer_ms: int = LIFETIME_MS
    """For how long its questions wait for the owner."""
    checkpoint: str = ""
    """When runs that change files get a checkpoint, overriding their items: `auto` or `disabled`, of a directive."""

    @property
    def reader(self) -> str:
        """The name under which text from outside is remembered as read: the thread, else the caller."""
        return self.origin.thread or self.name


NO_CALLER = Caller()
"""A caller that gets no progress and answers no question."""
