-- The registry: items, their versions, the files of each, and the log of what was done. Times are ISO 8601 in UTC.

create table namespaces (
  namespace text primary key,
  owner text not null,
  created_at text not null default (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

-- Types are data: one that is published for the first time is added, with a rule that leaves it open.
create table tool_types (
  tool_type text primary key,
  executor_rule text not null default 'optional' check (executor_rule in ('required', 'forbidden', 'optional'))
);

-- What is said of an item as a whole; name, description, type, executor, category and tags are those of its latest version.
create table tools (
  id text primary key,
  tool_id text not null,
  namespace text not null default 'public' references namespaces (namespace),
  name text,
  description text,
  tool_type text not null references tool_types (tool_type),
  executor_id text,
  category text,
  subcategory text,
  tags text not null default '[]',
  is_official integer not null default 0,
  is_builtin integer not null default 0,
  visibility text not null default 'public' check (visibility in ('public', 'unlisted', 'private')),
  download_count integer not null default 0,
  quality_score real check (quality_score between 0 and 1),
  latest_version text,
  created_at text not null default (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
  updated_at text not null default (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
  unique (namespace, tool_id)
);
create index idx_tools_tool_id on tools (tool_id);
create index idx_tools_tool_type on tools (tool_type, namespace, tool_id);
create index idx_tools_executor on tools (executor_id);
create index idx_tools_category on tools (category);

-- A row is a sealed version from the moment it exists: its files are added before it, in the same transaction.
create table tool_versions (
  id text primary key,
  tool_id text not null references tools (id),
  version text not null,
  version_key text not null,
  place text not null,
  manifest text not null,
  manifest_yaml text,
  manifest_sha256 text,
  manifest_canon text not null,
  content_hash text not null check (
    length(content_hash) = 71 and content_hash glob 'sha256:*' and substr(content_hash, 8) not glob '*[^0-9a-f]*'),
  executor_ref text,
  executor_namespace text,
  executor_tool_id text,
  executor_version text,
  executor_hash text,
  executor_version_id text references tool_versions (id),
  closure_hash text not null check (
    length(closure_hash) = 71 and closure_hash glob 'sha256:*' and substr(closure_hash, 8) not glob '*[^0-9a-f]*'),
  depth integer not null check (depth between 1 and 16),
  changelog text,
  is_latest integer not null default 0,
  is_prerelease integer not null default 0,
  published_by text not null,
  created_at text not null,
  sealed_at text not null,
  yanked_at text,
  yanked_reason text,
  deprecated_at text,
  deprecated_reason text,
  unique (tool_id, version),
  -- What ships with Kiwi may be missing here: its name and hash are kept for the record, and none of it travels.
  check ((executor_ref is null) = (executor_namespace is null) and (executor_ref is null) = (executor_tool_id is null)
    and (executor_ref is null) = (executor_version is null) and (executor_ref is null) = (executor_hash is null)),
  check (executor_version_id is null or executor_ref is not null),
  check (executor_version_id is not null or executor_ref is null or executor_namespace = 'kiwi'),
  check ((manifest_yaml is null) = (manifest_sha256 is null)),
  check ((executor_version_id is null) = (depth = 1))
);
create index idx_tool_versions_order on tool_versions (tool_id, version_key);
create unique index idx_tool_versions_latest on tool_versions (tool_id) where is_latest = true;
create index idx_tool_versions_hash on tool_versions (content_hash);
create index idx_tool_versions_executor on tool_versions (executor_version_id) where executor_version_id is not null;

-- Binary and large files, and large results, once each, by the hash of their bytes.
create table blobs (
  sha256 text primary key check (length(sha256) = 64 and sha256 not glob '*[^0-9a-f]*'),
  size_bytes integer not null check (size_bytes >= 0),
  content blob not null,
  created_at text not null default (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

create table tool_version_files (
  id text primary key,
  tool_version_id text not null references tool_versions (id) deferrable initially deferred,
  path text not null check (
    path <> '' and path not like '/%' and instr(path, '\') = 0
    and '/' || path || '/' not like '%/../%' and '/' || path || '/' not like '%/./%' and path not like '%//%'),
  media_type text,
  sha256 text not null check (length(sha256) = 64 and sha256 not glob '*[^0-9a-f]*'),
  size_bytes integer not null,
  mode integer not null default 420,
  is_entrypoint integer not null default 0,
  content_text text,
  storage_key text,
  created_at text not null,
  unique (tool_version_id, path),
  check ((content_text is null) <> (storage_key is null)),
  check (content_text is null or size_bytes < 65536),
  check (storage_key is null or storage_key = 'sha256:' || sha256)
);
create index idx_tool_files_storage on tool_version_files (storage_key) where storage_key is not null;

-- Every change, in one order, each entry sealed with the hash of the one before: the feed of a sync and the audit.
create table registry_log (
  seq integer primary key,
  op text not null check (op in ('publish', 'yank', 'unyank', 'deprecate', 'undeprecate', 'visibility')),
  namespace text not null,
  tool_id text not null,
  version text not null,
  content_hash text not null,
  closure_hash text not null,
  actor text not null,
  reason text not null,
  created_at text not null,
  prev_hash text not null,
  hash text not null
);
create index idx_registry_log_item on registry_log (tool_id, seq);

create table remotes (
  url text primary key,
  cursor_seq integer not null default 0,
  cursor_hash text,
  updated_at text not null
);

create table directive_embeddings (
  tool_id text not null references tools (id),
  model text not null,
  dim integer not null,
  text_hash text not null,
  embedding blob not null,
  primary key (tool_id, model)
);
create table tool_embeddings (
  tool_id text not null references tools (id),
  model text not null,
  dim integer not null,
  text_hash text not null,
  embedding blob not null,
  primary key (tool_id, model)
);
create table knowledge_embeddings (
  tool_id text not null references tools (id),
  model text not null,
  dim integer not null,
  text_hash text not null,
  embedding blob not null,
  primary key (tool_id, model)
);

create trigger tools_keep_their_name before update of namespace, tool_id on tools
when new.namespace is not old.namespace or new.tool_id is not old.tool_id
begin select raise(abort, 'an item keeps its name'); end;

create trigger versions_are_sealed before update on tool_versions
when new.id is not old.id or new.tool_id is not old.tool_id or new.version is not old.version
  or new.version_key is not old.version_key or new.place is not old.place or new.manifest is not old.manifest
  or new.manifest_yaml is not old.manifest_yaml or new.manifest_sha256 is not old.manifest_sha256
  or new.manifest_canon is not old.manifest_canon or new.content_hash is not old.content_hash
  or new.executor_ref is not old.executor_ref or new.executor_version_id is not old.executor_version_id
  or new.executor_namespace is not old.executor_namespace or new.executor_tool_id is not old.executor_tool_id
  or new.executor_version is not old.executor_version or new.executor_hash is not old.executor_hash
  or new.closure_hash is not old.closure_hash or new.depth is not old.depth or new.changelog is not old.changelog
  or new.is_prerelease is not old.is_prerelease or new.published_by is not old.published_by
  or new.created_at is not old.created_at or new.sealed_at is not old.sealed_at
begin select raise(abort, 'a published version never changes'); end;

create trigger versions_stay before delete on tool_versions
begin select raise(abort, 'a published version stays: yank it instead'); end;

create trigger files_come_before_their_version before insert on tool_version_files
when exists (select 1 from tool_versions where id = new.tool_version_id)
begin select raise(abort, 'a published version never changes'); end;

create trigger files_never_change before update on tool_version_files
begin select raise(abort, 'a published version never changes'); end;

create trigger files_stay before delete on tool_version_files
begin select raise(abort, 'a published version stays: yank it instead'); end;

create trigger blobs_never_change before update on blobs
begin select raise(abort, 'a blob never changes'); end;

create trigger blobs_of_versions_stay before delete on blobs
when exists (select 1 from tool_version_files where storage_key = 'sha256:' || old.sha256)
begin select raise(abort, 'a published version needs this blob'); end;

create trigger log_never_changes before update on registry_log
begin select raise(abort, 'the log is only added to'); end;

create trigger log_stays before delete on registry_log
begin select raise(abort, 'the log is only added to'); end;

insert into namespaces (namespace, owner) values ('kiwi', 'kiwi'), ('public', 'kiwi');

insert into tool_types (tool_type, executor_rule) values
  ('primitive', 'forbidden'), ('runtime', 'required'), ('mcp_server', 'required'), ('mcp_tool', 'required'),
  ('script', 'required'), ('api', 'required'), ('directive', 'required'), ('thread', 'required'),
  ('knowledge', 'forbidden'), ('composite', 'optional');
