-- Which worker runs a thread, and when: queues, schedules, workers. Times are milliseconds since 1970.

alter table threads add column queue text collate "C" not null default 'default';
alter table threads add column priority bigint not null default 0;
alter table threads add column wake_at bigint not null default 0;
alter table threads add column recoveries bigint not null default 0;

create table schedules (
  owner text collate "C" not null,
  name text collate "C" not null,
  item text collate "C" not null,
  inputs text collate "C" not null,
  limits text collate "C" not null,
  model text collate "C" not null,
  project text collate "C" not null,
  queue text collate "C" not null,
  priority bigint not null,
  cron text collate "C" not null,
  zone text collate "C" not null,
  overlap text collate "C" not null check (overlap in ('skip', 'queue', 'replace', 'allow')),
  misfire text collate "C" not null check (misfire in ('skip', 'latest', 'all')),
  jitter bigint not null check (jitter >= 0),
  is_paused smallint not null check (is_paused in (0, 1)),
  created_at bigint not null,
  next_at bigint not null,
  due_at bigint not null,
  primary key (owner, name)
);

create table occurrences (
  owner text collate "C" not null,
  name text collate "C" not null,
  created_at bigint not null,
  at bigint not null,
  status text collate "C" not null check (status in ('pending', 'started', 'skipped', 'failed')),
  thread_id text collate "C" not null,
  message text collate "C" not null,
  primary key (owner, name, created_at, at)
);

create table workers (
  process text collate "C" primary key,
  owner text collate "C" not null,
  host text collate "C" not null,
  pid bigint not null,
  queues text collate "C" not null,
  started_at bigint not null,
  beat_at bigint not null
);

create table queue_starts (
  owner text collate "C" not null,
  at bigint not null,
  thread_id text collate "C" not null,
  queue text collate "C" not null,
  provider text collate "C" not null,
  starter text collate "C" not null,
  primary key (owner, at, thread_id)
);
