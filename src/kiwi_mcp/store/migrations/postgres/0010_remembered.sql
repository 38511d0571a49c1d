-- The requests after which items were used: searches like them show those items first. `owner` is whose store it is,
-- `actor` whose requests they are: empty for the owner's own, else `=` and a name. Nobody is shown an item sooner because
-- somebody else wanted it. Times are milliseconds since 1970. The vector may come later.

create table remembered (
  owner text collate "C" not null,
  actor text collate "C" not null,
  project text collate "C" not null,
  item text collate "C" not null,
  request text collate "C" not null,
  is_run integer not null,
  at bigint not null,
  encoder text collate "C" not null,
  vector bytea not null,
  primary key (owner, actor, project, item, request)
);
create index idx_remembered_at on remembered (owner, actor, at);
