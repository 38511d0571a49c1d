-- Receipts: what every call that runs or changes something leaves, in one chain that is only added to. Each is sealed
-- with the hash of the one before it; all columns but the hash are hashed as they stand, so a time is text.

create table receipts (
  seq integer primary key check (seq > 0),
  id text not null,
  at text not null,
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
  duration_ms integer not null check (duration_ms >= 0),
  cost_micros integer not null check (cost_micros >= 0),
  detail text not null,
  previous text not null,
  hash text not null
);
-- No index but by number: a list reads from the end, and every call would pay for one more.

create trigger receipts_never_change before update on receipts
begin select raise(abort, 'receipts are only added to'); end;

create trigger receipts_stay before delete on receipts
begin select raise(abort, 'receipts are only added to'); end;
