-- Who wrote what, by the digest of the exact content, as far as Kiwi saw it; and what an owner lets run under a laxer
-- level than its origin has, by a hash of the exact chain. `holder` is whose knowledge it is: a store may have several
-- users, and what one of them wrote is not another's own.

create table authors (
  holder text collate "C" not null,
  digest text collate "C" not null,
  provenance text collate "C" not null check (provenance in ('owner_written', 'model_written', 'unknown')),
  actor text collate "C" not null,
  at text collate "C" not null,
  primary key (holder, digest)
);

create table relaxations (
  holder text collate "C" not null,
  chain text collate "C" not null,
  identity text collate "C" not null,
  digest text collate "C" not null,
  project text collate "C" not null,
  level text collate "C" not null check (level in ('trusted', 'standard', 'sandboxed')),
  reason text collate "C" not null,
  actor text collate "C" not null,
  at text collate "C" not null,
  primary key (holder, chain)
);
