-- The requests after which items were used: searches like them show those items first. `owner` is whose store it is,
-- `actor` whose requests they are: empty for the owner's own, else `=` and a name. Nobody is shown an item sooner because
-- somebody else wanted it. Times are milliseconds since 1970. The vector may come later.

create table remembered (
  owner text not null,
  actor text not null,
  project text not null,
  item text not null,
  request text not null,
  is_run integer not null,
  at integer not null,
  encoder text not null,
  vector blob not null,
  primary key (owner, actor, project, item, request)
) without rowid;
create index idx_remembered_at on remembered (owner, actor, at);
