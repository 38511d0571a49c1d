-- Calls that go on as tasks once their client was answered. The process that makes one says again and again that it
-- is still there, and what others want of it waits here until that process looks. Times are milliseconds since 1970.

create table tasks (
  id text primary key not null,
  actor text not null,
  principal text not null,
  method text not null,
  identity text not null,
  status text not null check (status in ('working', 'input_required', 'completed', 'failed', 'cancelled')),
  message text not null,
  detail text not null,
  created_at integer not null,
  updated_at integer not null,
  expires_at integer not null,
  owner text not null,
  beat_at integer not null,
  is_unwanted integer not null check (is_unwanted in (0, 1)),
  answers text not null
) without rowid;
create index idx_tasks_principal on tasks (actor, principal, created_at);
create index idx_tasks_expires on tasks (expires_at);
create index idx_tasks_running on tasks (owner) where status in ('working', 'input_required');
