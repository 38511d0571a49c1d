-- Calls that go on as tasks once their client was answered. The process that makes one says again and again that it
-- is still there, and what others want of it waits here until that process looks. Times are milliseconds since 1970.

create table tasks (
  id text collate "C" primary key,
  actor text collate "C" not null,
  principal text collate "C" not null,
  method text collate "C" not null,
  identity text collate "C" not null,
  status text collate "C" not null check (status in ('working', 'input_required', 'completed', 'failed', 'cancelled')),
  message text collate "C" not null,
  detail text collate "C" not null,
  created_at bigint not null,
  updated_at bigint not null,
  expires_at bigint not null,
  owner text collate "C" not null,
  beat_at bigint not null,
  is_unwanted smallint not null check (is_unwanted in (0, 1)),
  answers text collate "C" not null
);
create index idx_tasks_principal on tasks (actor, principal, created_at);
create index idx_tasks_expires on tasks (expires_at);
create index idx_tasks_running on tasks (owner) where status in ('working', 'input_required');
