-- Threads: one row for each, and its journal. An event has the hash of the one before it, of its body, and of what it
-- changed in the row. A body may be erased, and the chain still verifies. Texts above a limit are blobs, which
-- `thread_blobs` keeps from being pruned. Money is in millionths of a US dollar, times are milliseconds since 1970.

create table threads (
  id text collate "C" primary key check (length(id) = 26),
  owner text collate "C" not null,
  kind text collate "C" not null check (kind in ('thread', 'conversation')),
  item text collate "C" not null,
  directive text collate "C" not null,
  digest text collate "C" not null,
  starter text collate "C" not null,
  project text collate "C" not null,
  parent_id text collate "C" references threads (id),
  root_id text collate "C" not null,
  depth bigint not null check (depth >= 0),
  rights text collate "C" not null,
  limits text collate "C" not null,
  inputs text collate "C",
  inputs_sha256 text collate "C" not null,
  model text collate "C" not null,
  status text collate "C" not null check (
    status in ('queued', 'running', 'waiting', 'paused', 'completed', 'failed', 'cancelled', 'exhausted')),
  waits_for text collate "C" not null check (
    waits_for in ('', 'approval', 'question', 'message', 'child', 'budget', 'start')),
  command text collate "C" not null check (command in ('', 'pause', 'cancel')),
  lease bigint not null check (lease >= 0),
  lease_owner text collate "C" not null,
  beat_at bigint not null,
  seq bigint not null check (seq >= 0),
  head text collate "C" not null,
  is_tainted smallint not null check (is_tainted in (0, 1)),
  turns bigint not null check (turns >= 0),
  tool_calls bigint not null check (tool_calls >= 0),
  spawns bigint not null check (spawns >= 0),
  input_tokens bigint not null check (input_tokens >= 0),
  cache_read_tokens bigint not null check (cache_read_tokens >= 0),
  cache_write_tokens bigint not null check (cache_write_tokens >= 0),
  output_tokens bigint not null check (output_tokens >= 0),
  spend bigint not null check (spend >= 0),
  is_estimated smallint not null check (is_estimated in (0, 1)),
  spend_limit bigint not null check (spend_limit >= 0),
  token_limit bigint not null check (token_limit >= 0),
  reserved bigint not null check (reserved >= 0),
  reserved_tokens bigint not null check (reserved_tokens >= 0),
  result text collate "C",
  result_sha256 text collate "C",
  finish_reason text collate "C" not null check (
    finish_reason in ('', 'stop', 'limit', 'max_tokens', 'cancelled', 'error')),
  code text collate "C" not null,
  message text collate "C" not null,
  created_at bigint not null,
  updated_at bigint not null,
  ended_at bigint not null,
  erased_at bigint not null,
  check (status = 'waiting' or waits_for = ''),
  check ((ended_at > 0) = (status in ('completed', 'failed', 'cancelled', 'exhausted')))
);
create index idx_threads_live on threads (owner, status) where ended_at = 0;
create index idx_threads_root on threads (root_id);
create index idx_threads_parent on threads (parent_id) where parent_id is not null;

create table thread_events (
  thread_id text collate "C" not null references threads (id),
  seq bigint not null check (seq > 0),
  at bigint not null,
  kind text collate "C" not null,
  body text collate "C",
  body_sha256 text collate "C" not null check (length(body_sha256) = 64),
  changes text collate "C" not null,
  sha256 text collate "C" not null check (length(sha256) = 64),
  primary key (thread_id, seq)
);

create table thread_blobs (
  sha256 text collate "C" not null references blobs (sha256),
  thread_id text collate "C" not null references threads (id),
  primary key (sha256, thread_id)
);
create index idx_thread_blobs_thread on thread_blobs (thread_id);

create table budget_ledger (
  id text collate "C" primary key check (length(id) = 26),
  reservation text collate "C" not null,
  thread_id text collate "C" not null references threads (id),
  root_id text collate "C" not null,
  at bigint not null,
  kind text collate "C" not null check (kind in ('reserve', 'settle', 'charge_maximum', 'release', 'carve', 'return')),
  attempt bigint not null check (attempt >= 0),
  reserved bigint not null,
  reserved_tokens bigint not null,
  spend bigint not null check (spend >= 0),
  input_tokens bigint not null check (input_tokens >= 0),
  cache_read_tokens bigint not null check (cache_read_tokens >= 0),
  cache_write_tokens bigint not null check (cache_write_tokens >= 0),
  output_tokens bigint not null check (output_tokens >= 0),
  is_estimated smallint not null check (is_estimated in (0, 1)),
  model text collate "C" not null,
  price_source text collate "C" not null,
  check (kind <> 'reserve' or (reserved >= 0 and reserved_tokens >= 0)),
  check (kind in ('reserve', 'carve') or (reserved <= 0 and reserved_tokens <= 0))
);
create unique index idx_budget_ledger_closed on budget_ledger (reservation)
  where kind in ('settle', 'charge_maximum', 'release', 'return');
create index idx_budget_ledger_thread on budget_ledger (thread_id, id);
create index idx_budget_ledger_root on budget_ledger (root_id, id);

create table budget_days (
  owner text collate "C" not null,
  starter text collate "C" not null,
  day bigint not null,
  spend bigint not null check (spend >= 0),
  reserved bigint not null check (reserved >= 0),
  primary key (owner, day, starter)
);

create table questions (
  id text collate "C" primary key check (length(id) = 26),
  owner text collate "C" not null,
  thread_id text collate "C" not null references threads (id),
  root_id text collate "C" not null,
  call_id text collate "C" not null,
  kind text collate "C" not null check (kind in ('ask', 'budget', 'start', 'loop')),
  message text collate "C" not null,
  schema text collate "C" not null,
  created_at bigint not null,
  expires_at bigint not null,
  status text collate "C" not null check (status in ('open', 'answered', 'expired', 'withdrawn')),
  answer text collate "C" not null,
  answered_by text collate "C" not null,
  answered_at bigint not null
);
create index idx_questions_open on questions (owner, expires_at) where status = 'open';
create index idx_questions_thread on questions (thread_id);

create table thread_deltas (
  thread_id text collate "C" not null references threads (id),
  seq bigint not null,
  n bigint not null,
  text text collate "C" not null,
  primary key (thread_id, seq, n)
);

create trigger thread_events_never_change before update on thread_events for each row
  when (
    new.body is not null or new.thread_id is distinct from old.thread_id or new.seq is distinct from old.seq
    or new.at is distinct from old.at or new.kind is distinct from old.kind
    or new.body_sha256 is distinct from old.body_sha256 or new.changes is distinct from old.changes
    or new.sha256 is distinct from old.sha256)
  execute function kiwi_refuse('the events of a thread are only added to');
create trigger thread_events_stay before delete on thread_events for each row
  execute function kiwi_refuse('the events of a thread are only added to');
create trigger thread_events_are_not_emptied before truncate on thread_events
  execute function kiwi_refuse('the events of a thread are only added to');

create trigger budget_ledger_never_changes before update on budget_ledger for each row
  execute function kiwi_refuse('the ledger is only added to');
create trigger budget_ledger_stays before delete on budget_ledger for each row
  execute function kiwi_refuse('the ledger is only added to');
create trigger budget_ledger_is_not_emptied before truncate on budget_ledger
  execute function kiwi_refuse('the ledger is only added to');
