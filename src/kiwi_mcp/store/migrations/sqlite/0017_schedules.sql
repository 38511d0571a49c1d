-- Which worker runs a thread, and when: queues, schedules, workers. Times are milliseconds since 1970.

alter table threads add column queue text not null default 'default';
alter table threads add column priority integer not null default 0;
alter table threads add column wake_at integer not null default 0;
alter table threads add column recoveries integer not null default 0;

create table schedules (
  owner text not null,
  name text not null,
  item text not null,
  inputs text not null,
  limits text not null,
  model text not null,
  project text not null,
  queue text not null,
  priority integer not null,
  cron text not null,
  zone text not null,
  overlap text not null check (overlap in ('skip', 'queue', 'replace', 'allow')),
  misfire text not null check (misfire in ('skip', 'latest', 'all')),
  jitter integer not null check (jitter >= 0),
  is_paused integer not null check (is_paused in (0, 1)),
  created_at integer not null,
  next_at integer not null,
  due_at integer not null,
  primary key (owner, name)
) without rowid;

create table occurrences (
  owner text not null,
  name text not null,
  created_at integer not null,
  at integer not null,
  status text not null check (status in ('pending', 'started', 'skipped', 'failed')),
  thread_id text not null,
  message text not null,
  primary key (owner, name, created_at, at)
) without rowid;

create table workers (
  process text primary key not null,
  owner text not null,
  host text not null,
  pid integer not null,
  queues text not null,
  started_at integer not null,
  beat_at integer not null
) without rowid;

create table queue_starts (
  owner text not null,
  at integer not null,
  thread_id text not null,
  queue text not null,
  provider text not null,
  starter text not null,
  primary key (owner, at, thread_id)
) without rowid;
