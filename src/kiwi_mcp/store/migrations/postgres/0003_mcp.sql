-- What MCP servers offer: kept so that it can be found while they are stopped, and pinned to what the owner accepted.
-- A server is known by whose it is, the folder its manifest is in, and its name.

create table mcp_servers (
  actor text collate "C" not null,
  space text collate "C" not null,
  server text collate "C" not null,
  identity text collate "C" not null,
  path text collate "C" not null,
  digest text collate "C" not null,
  version text collate "C" not null,
  era text not null check (era in ('', 'modern', 'legacy')),
  protocol_version text collate "C" not null,
  info text collate "C" not null,
  instructions text collate "C" not null,
  seen_at text collate "C" not null,
  fault text collate "C" not null,
  fault_at text collate "C" not null,
  accepts_first smallint not null check (accepts_first in (0, 1)),
  mark text collate "C" not null,
  primary key (actor, space, server)
);

create table mcp_definitions (
  actor text collate "C" not null,
  space text collate "C" not null,
  server text collate "C" not null,
  kind text collate "C" not null check (kind in ('tool', 'prompt', 'resource', 'template')),
  name text collate "C" not null,
  tool_id text collate "C" not null,
  state text not null check (state in ('accepted', 'changed', 'new', 'gone')),
  definition text collate "C" not null,
  digest text not null check (length(digest) = 64),
  accepted text,
  accepted_digest text collate "C" not null,
  seen_at text collate "C" not null,
  accepted_at text collate "C" not null,
  primary key (actor, space, server, kind, name),
  foreign key (actor, space, server) references mcp_servers (actor, space, server) on delete cascade,
  check ((accepted is null) = (accepted_digest = '')),
  check (state <> 'accepted' or accepted_digest = digest)
);
create unique index idx_mcp_definitions_tool_id on mcp_definitions (actor, tool_id, space, server);
