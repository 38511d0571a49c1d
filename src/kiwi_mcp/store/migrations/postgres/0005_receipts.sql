-- Receipts: what every call that runs or changes something leaves, in one chain that is only added to. Each is sealed
-- with the hash of the one before it; all columns but the hash are hashed as they stand, so a time is text.

create table receipts (
  seq bigint primary key check (seq > 0),
  id text collate "C" not null,
  at text collate "C" not null,
  actor text not null,
  surface text not null,
  action text not null,
  item text not null,
  status text not null,
  level text not null,
  code text not null,
  identity text not null,
  digest text not null,
  plan_digest text not null,
  verdict text not null,
  arguments_sha256 text not null,
  outcome_sha256 text not null,
  duration_ms bigint not null check (duration_ms >= 0),
  cost_micros bigint not null check (cost_micros >= 0),
  detail text not null,
  previous text not null,
  hash text not null
);
-- No index but by number: a list reads from the end, and every call would pay for one more.

create trigger receipts_never_change before update on receipts for each row
  execute function kiwi_refuse('receipts are only added to');
create trigger receipts_stay before delete on receipts for each row
  execute function kiwi_refuse('receipts are only added to');
create trigger receipts_are_not_emptied before truncate on receipts
  execute function kiwi_refuse('receipts are only added to');
