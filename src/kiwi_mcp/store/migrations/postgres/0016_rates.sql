-- The calls of the last minute that a rate limit counts, shared by all processes.

create table rate_calls (
  owner text collate "C" not null,
  rule text collate "C" not null,
  at bigint not null
);
create index idx_rate_calls on rate_calls (owner, rule, at);
