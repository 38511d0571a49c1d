-- What MCP servers offer: kept so that it can be found while they are stopped, and pinned to what the owner accepted.
-- A server is known by whose it is, the folder its manifest is in, and its name.

create table mcp_servers (
  actor text not null,
  space text not null,
  server text not null,
  identity text not null,
  path text not null,
  digest text not null,
  version text not null,
  era text not null check (era in ('', 'modern', 'legacy')),
  protocol_version text not null,
  info text not null,
  instructions text not null,
  seen_at text not null,
  fault text not null,
  fault_at text not null,
  accepts_first integer not null check (accepts_first in (0, 1)),
  mark text not null,
  primary key (actor, space, server)
) without rowid;

create table mcp_definitions (
  actor text not null,
  space text not null,
  server text not null,
  kind text not null check (kind in ('tool', 'prompt', 'resource', 'template')),
  name text not null,
  tool_id text not null,
  state text not null check (state in ('accepted', 'changed', 'new', 'gone')),
  definition text not null,
  digest text not null check (length(digest) = 64),
  accepted text,
  accepted_digest text not null,
  seen_at text not null,
  accepted_at text not null,
  primary key (actor, space, server, kind, name),
  foreign key (actor, space, server) references mcp_servers (actor, space, server) on delete cascade,
  check ((accepted is null) = (accepted_digest = '')),
  check (state <> 'accepted' or accepted_digest = digest)
) without rowid;
create unique index idx_mcp_definitions_tool_id on mcp_definitions (actor, tool_id, space, server);
