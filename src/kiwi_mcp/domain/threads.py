"""Threads: a directive that a model executes, its limits and usage, its row and journal; schedules that start them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.messages import ReplyDelta

ThreadStatus: TypeAlias = Literal[
    "queued", "running", "waiting", "paused", "completed", "failed", "cancelled", "exhausted"
]
ENDED: frozenset[str] = frozenset({"completed", "failed", "cancelled", "exhausted"})
FinishReason: TypeAlias = Literal["stop", "limit", "max_tokens", "cancelled", "error"]
WaitReason: TypeAlias = Literal["", "approval", "question", "message", "child", "budget", "start"]
"""What a waiting thread waits for; `start`: the owner has to permit its first start."""
EXIT_CODES: Mapping[str, int] = {
    "failed": 1, "approval": 6, "waiting": 9, "paused": 9, "exhausted": 10, "cancelled": 11,
}  # fmt: skip
"""The exit code of a command that waited for a thread, by its status; `approval` if it waits for one. Else it is 0."""
TOKEN_CLASSES = ("input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens")
EventKind: TypeAlias = Literal[
    "created", "prompt", "model", "model_failed", "began", "result", "asked", "hook_began", "hooked", "injected",
    "compacted", "loaded", "skill", "instructions", "spawned", "limit", "step", "resumed", "returned", "switched",
    "ended",
]  # fmt: skip
Overlap: TypeAlias = Literal["skip", "queue", "replace", "allow"]
"""What happens at a time when the thread of an earlier time has not ended."""
Misfire: TypeAlias = Literal["skip", "latest", "all"]
"""Which of the times that passed while no worker ran are made up for."""


class DayLimits(Struct, frozen=True):
    """What may be spent in one day in UTC, in millionths of a US dollar: by each starter, and by all of an owner."""

    starter: int = 5_000_000
    owner: int = 20_000_000


class ThreadLimits(Struct, frozen=True):
    """What a thread may use. A limit of n allows exactly n. Every default is finite."""

    turns: int = 25
    tokens: int = 200_000
    spend: int = 1_000_000
    """Money, in millionths of a US dollar."""
    seconds: float = 1_800
    spawns: int = 10
    depth: int = 10
    tool_calls: int = 200
    children: int = 5
    """How many of its children may run or wait at the same time."""
    threads: int = 20
    """How many children there may be in the whole tree, those that have ended among them."""
    answer_seconds: int = 604_800
    """For how long a question to the owner waits."""
    on_exceeded: Literal["stop", "warn", "escalate"] = "stop"


class ThreadUsage(Struct, frozen=True):
    """What a thread used. Tokens and money include those of its children that have ended."""

    turns: int = 0
    tool_calls: int = 0
    spawns: int = 0
    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    spend: int = 0
    """Money, in millionths of a US dollar."""
    is_estimated: bool = False

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens + self.output_tokens

    def to_json(self) -> JsonObject:
        """Return the usage as users see it, with money in dollars."""
        counts = {name: getattr(self, name) for name in ("turns", "tool_calls", *TOKEN_CLASSES)}
        return {**counts, "spend": self.spend / 1_000_000, "currency": "USD", "estimated": self.is_estimated}


class ThreadEvent(Struct, frozen=True):
    """One event of a journal. `sha256` covers the event before it, the hash of the body, and `changes`."""

    thread_id: str
    seq: int
    at: int
    """Milliseconds since 1970."""
    kind: EventKind
    body: JsonObject
    body_sha256: str
    sha256: str
    changes: JsonObject = field(default_factory=dict)
    """What the event changed in the row of the thread."""
    is_erased: bool = False
    """Whether the body was erased; it is empty then."""


ThreadObserver: TypeAlias = Callable[[ThreadEvent | ReplyDelta], None]
"""Is given every event that was stored, and pieces of replies while they stream. It must not block."""


def unobserved(_: ThreadEvent | ReplyDelta) -> None:
    """Observe nothing."""


class NewEvent(Struct, frozen=True):
    """An event that is to be appended."""

    kind: EventKind
    body: JsonObject


class Thread(Struct, frozen=True):
    """The row of a thread: what it is, what it may use, and where it stands. It can be rebuilt from its journal."""

    id: str
    kind: Literal["thread", "conversation"]
    item: str
    """The identity of the thread item or the directive that was started."""
    directive: str
    """The identity of the directive."""
    digest: str
    """The digest of the directive when the thread started."""
    starter: str
    """The name of the identity that started the root thread; empty for the owner."""
    project: str
    limits: ThreadLimits
    created_at: int
    parent_id: str = ""
    root_id: str = ""
    depth: int = 0
    rights: JsonObject = field(default_factory=dict)
    """The grants that narrow every call, each as JSON."""
    inputs: JsonObject = field(default_factory=dict)
    model: str = ""
    """`provider/model`, once it was chosen."""
    status: ThreadStatus = "queued"
    waits_for: WaitReason = ""
    command: Literal["", "pause", "cancel"] = ""
    """What another process asked for; it acts between two steps."""
    lease: int = 0
    """Grows when a process takes the thread; a process with an older number can append nothing."""
    lease_owner: str = ""
    beat_at: int = 0
    seq: int = 0
    head: str = ""
    """The hash of the last event."""
    is_tainted: bool = False
    """Whether the thread has read text from outside."""
    usage: ThreadUsage = ThreadUsage()
    reserved: int = 0
    """Money that is reserved for requests under way and for children."""
    reserved_tokens: int = 0
    result: Json = None
    finish_reason: FinishReason | Literal[""] = ""
    code: str = ""
    message: str = ""
    updated_at: int = 0
    ended_at: int = 0
    owner: str = ""
    """The user of the store who owns it; set by the store."""
    queue: str = "default"
    priority: int = 0
    """Threads with a higher number are taken first."""
    wake_at: int = 0
    """When a thread that waits continues even if nothing happened, in milliseconds since 1970; 0 for never."""
    recoveries: int = 0
    """How often the thread was taken over from a process that died, since it last waited."""

    @property
    def is_detached(self) -> bool:
        """Whether it continues after its parent has ended."""
        return self.rights.get("detached") is True

    @property
    def is_ended(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.status in ENDED


class ThreadChanges(Struct, frozen=True, omit_defaults=True):
    """What an append changes in the row of a thread. Money and tokens change by settling reservations only."""

    status: ThreadStatus | None = None
    waits_for: WaitReason = ""
    """Stored with `status`, as is `wake_at`."""
    wake_at: int = 0
    model: str | None = None
    is_tainted: bool | None = None
    limits: ThreadLimits | None = None
    turns: int = 0
    """How many more turns, tool calls and spawns were made."""
    tool_calls: int = 0
    spawns: int = 0
    result: Json | UnsetType = UNSET
    finish_reason: FinishReason | None = None
    code: str | None = None
    message: str | None = None


class ThreadQuestion(Struct, frozen=True):
    """A question of a thread to its owner. It waits in the store and survives every process."""

    id: str
    thread_id: str
    call_id: str
    kind: Literal["ask", "budget", "start", "loop"]
    message: str
    schema: JsonObject
    created_at: int
    expires_at: int
    status: Literal["open", "answered", "expired", "withdrawn"] = "open"
    answer: Json = None
    answered_by: str = ""
    answered_at: int = 0


class Schedule(Struct, frozen=True):
    """When which item starts, with which inputs. Times are milliseconds since 1970."""

    name: str
    item: str
    cron: str
    zone: str
    created_at: int
    inputs: JsonObject = field(default_factory=dict)
    limits: JsonObject = field(default_factory=dict)
    model: str = ""
    project: str = ""
    queue: str = "default"
    priority: int = 0
    overlap: Overlap = "skip"
    misfire: Misfire = "latest"
    jitter: int = 0
    """The largest delay of a start, in seconds; each time has its own."""
    is_paused: bool = False
    next_at: int = 0
    """The next time of the cron expression."""
    due_at: int = 0
    """The next time, with its delay."""

    @property
    def starter(self) -> str:
        """The identity of the threads that it starts."""
        return f"schedule:{self.name}"


class Occurrence(Struct, frozen=True):
    """One time of a schedule, and what came of it."""

    at: int
    status: Literal["pending", "started", "skipped", "failed"]
    thread_id: str = ""
    message: str = ""
