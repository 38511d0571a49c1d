-- Runs that change or send something are stored as `started` before they start. A run of which nobody knows how it ended
-- is `unknown`. `started_calls` has the receipt of each call that has not ended, and the kernel that makes the call.

create table runs_new (
  id text primary key not null check (length(id) = 26),
  tool_id text not null,
  status text not null check (
    status in ('success', 'ready', 'error', 'timeout', 'unavailable', 'cancelled', 'refused',
      'started', 'unknown')),
  started_at text not null,
  duration_ms integer not null check (duration_ms >= 0),
  actor text not null,
  project text not null,
  identity text not null,
  digest text not null,
  plan_digest text not null,
  code text not null,
  message text not null,
  exit_code integer,
  cost_micros integer not null default 0 check (cost_micros >= 0),
  output text not null,
  result_sha256 text references blobs (sha256),
  result_size integer check (result_size >= 0),
  check (result_sha256 is null or result_size is not null)
) without rowid;

insert into runs_new select * from runs;
drop table runs;
alter table runs_new rename to runs;
create index idx_runs_result on runs (result_sha256) where result_sha256 is not null;

create table started_calls (
  id text primary key not null check (length(id) = 26),
  kernel text not null,
  receipt text not null
) without rowid;
