-- Threads: one row for each, and its journal. An event has the hash of the one before it, of its body, and of what it
-- changed in the row. A body may be erased, and the chain still verifies. Texts above a limit are blobs, which
-- `thread_blobs` keeps from being pruned. Money is in millionths of a US dollar, times are milliseconds since 1970.

create table threads (
  id text primary key not null check (length(id) = 26),
  owner text not null,
  kind text not null check (kind in ('thread', 'conversation')),
  item text not null,
  directive text not null,
  digest text not null,
  starter text not null,
  project text not null,
  parent_id text references threads (id),
  root_id text not null,
  depth integer not null check (depth >= 0),
  rights text not null,
  limits text not null,
  inputs text,
  inputs_sha256 text not null,
  model text not null,
  status text not null check (
    status in ('queued', 'running', 'waiting', 'paused', 'completed', 'failed', 'cancelled', 'exhausted')),
  waits_for text not null check (
    waits_for in ('', 'approval', 'question', 'message', 'child', 'budget', 'start')),
  command text not null check (command in ('', 'pause', 'cancel')),
  lease integer not null check (lease >= 0),
  lease_owner text not null,
  beat_at integer not null,
  seq integer not null check (seq >= 0),
  head text not null,
  is_tainted integer not null check (is_tainted in (0, 1)),
  turns integer not null check (turns >= 0),
  tool_calls integer not null check (tool_calls >= 0),
  spawns integer not null check (spawns >= 0),
  input_tokens integer not null check (input_tokens >= 0),
  cache_read_tokens integer not null check (cache_read_tokens >= 0),
  cache_write_tokens integer not null check (cache_write_tokens >= 0),
  output_tokens integer not null check (output_tokens >= 0),
  spend integer not null check (spend >= 0),
  is_estimated integer not null check (is_estimated in (0, 1)),
  spend_limit integer not null check (spend_limit >= 0),
  token_limit integer not null check (token_limit >= 0),
  reserved integer not null check (reserved >= 0),
  reserved_tokens integer not null check (reserved_tokens >= 0),
  result text,
  result_sha256 text,
  finish_reason text not null check (
    finish_reason in ('', 'stop', 'limit', 'max_tokens', 'cancelled', 'error')),
  code text not null,
  message text not null,
  created_at integer not null,
  updated_at integer not null,
  ended_at integer not null,
  erased_at integer not null,
  check (status = 'waiting' or waits_for = ''),
  check ((ended_at > 0) = (status in ('completed', 'failed', 'cancelled', 'exhausted')))
);
create index idx_threads_live on threads (owner, status) where ended_at = 0;
create index idx_threads_root on threads (root_id);
create index idx_threads_parent on threads (parent_id) where parent_id is not null;

create table thread_events (
  thread_id text not null references threads (id),
  seq integer not null check (seq > 0),
  at integer not null,
  kind text not null,
  body text,
  body_sha256 text not null check (length(body_sha256) = 64),
  changes text not null,
  sha256 text not null check (length(sha256) = 64),
  primary key (thread_id, seq)
);

create table thread_blobs (
  sha256 text not null references blobs (sha256),
  thread_id text not null references threads (id),
  primary key (sha256, thread_id)
) without rowid;
create index idx_thread_blobs_thread on thread_blobs (thread_id);

create table budget_ledger (
  id text primary key not null check (length(id) = 26),
  reservation text not null,
  thread_id text not null references threads (id),
  root_id text not null,
  at integer not null,
  kind text not null check (kind in ('reserve', 'settle', 'charge_maximum', 'release', 'carve', 'return')),
  attempt integer not null check (attempt >= 0),
  reserved integer not null,
  reserved_tokens integer not null,
  spend integer not null check (spend >= 0),
  input_tokens integer not null check (input_tokens >= 0),
  cache_read_tokens integer not null check (cache_read_tokens >= 0),
  cache_write_tokens integer not null check (cache_write_tokens >= 0),
  output_tokens integer not null check (output_tokens >= 0),
  is_estimated integer not null check (is_estimated in (0, 1)),
  model text not null,
  price_source text not null,
  check (kind <> 'reserve' or (reserved >= 0 and reserved_tokens >= 0)),
  check (kind in ('reserve', 'carve') or (reserved <= 0 and reserved_tokens <= 0))
) without rowid;
create unique index idx_budget_ledger_closed on budget_ledger (reservation)
  where kind in ('settle', 'charge_maximum', 'release', 'return');
create index idx_budget_ledger_thread on budget_ledger (thread_id, id);
create index idx_budget_ledger_root on budget_ledger (root_id, id);

create table budget_days (
  owner text not null,
  starter text not null,
  day integer not null,
  spend integer not null check (spend >= 0),
  reserved integer not null check (reserved >= 0),
  primary key (owner, day, starter)
) without rowid;

create table questions (
  id text primary key not null check (length(id) = 26),
  owner text not null,
  thread_id text not null references threads (id),
  root_id text not null,
  call_id text not null,
  kind text not null check (kind in ('ask', 'budget', 'start', 'loop')),
  message text not null,
  schema text not null,
  created_at integer not null,
  expires_at integer not null,
  status text not null check (status in ('open', 'answered', 'expired', 'withdrawn')),
  answer text not null,
  answered_by text not null,
  answered_at integer not null
) without rowid;
create index idx_questions_open on questions (owner, expires_at) where status = 'open';
create index idx_questions_thread on questions (thread_id);

create table thread_deltas (
  thread_id text not null references threads (id),
  seq integer not null,
  n integer not null,
  text text not null,
  primary key (thread_id, seq, n)
) without rowid;

create trigger thread_events_never_change before update on thread_events
  when new.body is not null or new.thread_id is not old.thread_id or new.seq is not old.seq or new.at is not old.at
    or new.kind is not old.kind or new.body_sha256 is not old.body_sha256 or new.changes is not old.changes
    or new.sha256 is not old.sha256
begin select raise(abort, 'the events of a thread are only added to'); end;

create trigger thread_events_stay before delete on thread_events
begin select raise(abort, 'the events of a thread are only added to'); end;

create trigger budget_ledger_never_changes before update on budget_ledger
begin select raise(abort, 'the ledger is only added to'); end;

create trigger budget_ledger_stays before delete on budget_ledger
begin select raise(abort, 'the ledger is only added to'); end;
