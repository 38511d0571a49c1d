-- Runs that change or send something are stored as `started` before they start. A run of which nobody knows how it ended
-- is `unknown`. `started_calls` has the receipt of each call that has not ended, and the kernel that makes the call.

alter table runs drop constraint runs_status_check;
alter table runs add constraint runs_status_check check (
  status in ('success', 'ready', 'error', 'timeout', 'unavailable', 'cancelled', 'refused', 'started', 'unknown'));

create table started_calls (
  id text collate "C" primary key check (length(id) = 26),
  kernel text not null,
  receipt text not null
);
