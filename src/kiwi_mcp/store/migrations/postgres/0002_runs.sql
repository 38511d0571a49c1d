-- Runs: what every call leaves. The order of the ids is the order of time, and a large result is a blob.

create table runs (
  id text collate "C" primary key check (length(id) = 26),
  tool_id text collate "C" not null,
  status text not null check (
    status in ('success', 'ready', 'error', 'timeout', 'unavailable', 'cancelled', 'refused')),
  started_at timestamptz not null,
  duration_ms bigint not null check (duration_ms >= 0),
  actor text not null,
  project text not null,
  identity text not null,
  digest text not null,
  plan_digest text not null,
  code text not null,
  message text not null,
  exit_code bigint,
  cost_micros bigint not null default 0 check (cost_micros >= 0),
  output text not null,
  result_sha256 text collate "C" references blobs (sha256),
  result_size bigint check (result_size >= 0),
  check (result_sha256 is null or result_size is not null)
);
-- No index by tool, status or project: few enough are kept to be looked through, and every run would pay for it.
create index idx_runs_result on runs (result_sha256) where result_sha256 is not null;
