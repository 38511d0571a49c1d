-- Who wrote what, by the digest of the exact content, as far as Kiwi saw it; and what an owner lets run under a laxer
-- level than its origin has, by a hash of the exact chain. `holder` is whose knowledge it is: a store may have several
-- users, and what one of them wrote is not another's own.

create table authors (
  holder text not null,
  digest text not null,
  provenance text not null check (provenance in ('owner_written', 'model_written', 'unknown')),
  actor text not null,
  at text not null,
  primary key (holder, digest)
) without rowid;

create table relaxations (
  holder text not null,
  chain text not null,
  identity text not null,
  digest text not null,
  project text not null,
  level text not null check (level in ('trusted', 'standard', 'sandboxed')),
  reason text not null,
  actor text not null,
  at text not null,
  primary key (holder, chain)
) without rowid;
