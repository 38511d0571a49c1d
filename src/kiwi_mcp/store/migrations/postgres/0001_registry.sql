-- The registry: items, their versions, the files of each, and the log of what was done.

create table namespaces (
  namespace text collate "C" primary key,
  owner text not null,
  created_at timestamptz not null default now()
);

-- Types are data: one that is published for the first time is added, with a rule that leaves it open.
create table tool_types (
  tool_type text collate "C" primary key,
  executor_rule text not null default 'optional' check (executor_rule in ('required', 'forbidden', 'optional'))
);

-- What is said of an item as a whole; name, description, type, executor, category and tags are those of its latest version.
create table tools (
  id uuid primary key default gen_random_uuid(),
  tool_id text collate "C" not null,
  namespace text collate "C" not null default 'public' references namespaces (namespace),
  name text,
  description text,
  tool_type text collate "C" not null references tool_types (tool_type),
  executor_id text collate "C",
  category text,
  subcategory text,
  tags text[] not null default '{}',
  is_official boolean not null default false,
  is_builtin boolean not null default false,
  visibility text not null default 'public' check (visibility in ('public', 'unlisted', 'private')),
  download_count integer not null default 0,
  quality_score numeric(3, 2) check (quality_score between 0 and 1),
  latest_version text,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  unique (namespace, tool_id)
);
create index idx_tools_tool_id on tools (tool_id);
create index idx_tools_tool_type on tools (tool_type, namespace, tool_id);
create index idx_tools_executor on tools (executor_id);
create index idx_tools_category on tools (category);

-- A row is a sealed version from the moment it exists: its files are added before it, in the same transaction.
create table tool_versions (
  id uuid primary key default gen_random_uuid(),
  tool_id uuid not null references tools (id),
  version text not null,
  version_key text collate "C" not null,
  place text not null,
  manifest jsonb not null,
  manifest_yaml text,
  manifest_sha256 text,
  manifest_canon text not null,
  content_hash text collate "C" not null check (content_hash ~ '^sha256:[0-9a-f]{64}$'),
  executor_ref text,
  executor_namespace text,
  executor_tool_id text,
  executor_version text,
  executor_hash text,
  executor_version_id uuid references tool_versions (id),
  closure_hash text not null check (closure_hash ~ '^sha256:[0-9a-f]{64}$'),
  depth integer not null check (depth between 1 and 16),
  changelog text,
  is_latest boolean not null default false,
  is_prerelease boolean not null default false,
  published_by text not null,
  created_at timestamptz not null,
  sealed_at timestamptz not null,
  yanked_at timestamptz,
  yanked_reason text,
  deprecated_at timestamptz,
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
  sha256 text collate "C" primary key check (sha256 ~ '^[0-9a-f]{64}$'),
  size_bytes bigint not null check (size_bytes >= 0),
  content bytea not null,
  created_at timestamptz not null default now()
);

create table tool_version_files (
  id uuid primary key default gen_random_uuid(),
  tool_version_id uuid not null references tool_versions (id) deferrable initially deferred,
  path text collate "C" not null check (
    path <> '' and path not like '/%' and strpos(path, chr(92)) = 0
    and '/' || path || '/' not like '%/../%' and '/' || path || '/' not like '%/./%' and path not like '%//%'),
  media_type text,
  sha256 text not null check (sha256 ~ '^[0-9a-f]{64}$'),
  size_bytes integer not null,
  mode integer not null default 420,
  is_entrypoint boolean not null default false,
  content_text text,
  storage_key text collate "C",
  created_at timestamptz not null,
  unique (tool_version_id, path),
  check ((content_text is null) <> (storage_key is null)),
  check (content_text is null or size_bytes < 65536),
  check (storage_key is null or storage_key = 'sha256:' || sha256)
);
create index idx_tool_files_storage on tool_version_files (storage_key) where storage_key is not null;

-- Every change, in one order, each entry sealed with the hash of the one before: the feed of a sync and the audit.
-- Its times are text, because they are hashed as they were written.
create table registry_log (
  seq bigint primary key,
  op text not null check (op in ('publish', 'yank', 'unyank', 'deprecate', 'undeprecate', 'visibility')),
  namespace text collate "C" not null,
  tool_id text collate "C" not null,
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
  cursor_seq bigint not null default 0,
  cursor_hash text,
  updated_at timestamptz not null
);

-- Vectors are compared by pgvector where the server has it; elsewhere they are kept as bytes, as SQLite does.
do $$
declare
  kind text;
  has_vectors boolean := exists (select 1 from pg_available_extensions where name = 'vector');
begin
  if has_vectors then
    begin
      create extension if not exists vector;
    exception when insufficient_privilege or undefined_file then
      has_vectors := false;
    end;
  end if;
  foreach kind in array array['directive', 'tool', 'knowledge'] loop
    execute format(
      'create table %I (tool_id uuid not null references tools (id), model text not null, dim integer not null, '
      'text_hash text not null, embedding %s not null, fts tsvector, primary key (tool_id, model))',
      kind || '_embeddings', case when has_vectors then 'halfvec' else 'bytea' end);
    execute format('create index %I on %I using gin (fts)', 'idx_' || kind || '_fts', kind || '_embeddings');
    if has_vectors then
      execute format(
        'create index %I on %I using hnsw ((embedding::halfvec(384)) halfvec_cosine_ops) where dim = 384',
        'idx_' || kind || '_hnsw', kind || '_embeddings');
    end if;
  end loop;
end $$;

create function kiwi_refuse() returns trigger language plpgsql as $$
begin
  raise exception using errcode = 'integrity_constraint_violation', message = tg_argv[0];
end $$;

create function kiwi_files_come_first() returns trigger language plpgsql as $$
begin
  if exists (select 1 from added join tool_versions on tool_versions.id = added.tool_version_id) then
    raise exception using errcode = 'integrity_constraint_violation', message = 'a published version never changes';
  end if;
  return null;
end $$;

create function kiwi_blob_is_free() returns trigger language plpgsql as $$
begin
  if exists (select 1 from tool_version_files where storage_key = 'sha256:' || old.sha256) then
    raise exception using errcode = 'integrity_constraint_violation', message = 'a published version needs this blob';
  end if;
  return old;
end $$;

create trigger tools_keep_their_name before update of namespace, tool_id on tools for each row
  when (new.namespace is distinct from old.namespace or new.tool_id is distinct from old.tool_id)
  execute function kiwi_refuse('an item keeps its name');

create trigger versions_are_sealed before update on tool_versions for each row
  when (
    new.id is distinct from old.id or new.tool_id is distinct from old.tool_id
    or new.version is distinct from old.version or new.version_key is distinct from old.version_key
    or new.place is distinct from old.place or new.manifest is distinct from old.manifest
    or new.manifest_yaml is distinct from old.manifest_yaml
    or new.manifest_sha256 is distinct from old.manifest_sha256
    or new.manifest_canon is distinct from old.manifest_canon or new.content_hash is distinct from old.content_hash
    or new.executor_ref is distinct from old.executor_ref
    or new.executor_version_id is distinct from old.executor_version_id
    or new.executor_namespace is distinct from old.executor_namespace
    or new.executor_tool_id is distinct from old.executor_tool_id
    or new.executor_version is distinct from old.executor_version
    or new.executor_hash is distinct from old.executor_hash
    or new.closure_hash is distinct from old.closure_hash or new.depth is distinct from old.depth
    or new.changelog is distinct from old.changelog or new.is_prerelease is distinct from old.is_prerelease
    or new.published_by is distinct from old.published_by or new.created_at is distinct from old.created_at
    or new.sealed_at is distinct from old.sealed_at)
  execute function kiwi_refuse('a published version never changes');

create trigger versions_stay before delete on tool_versions for each row
  execute function kiwi_refuse('a published version stays: yank it instead');
create trigger versions_are_not_emptied before truncate on tool_versions
  execute function kiwi_refuse('a published version stays: yank it instead');

create trigger files_come_before_their_version after insert on tool_version_files
  referencing new table as added for each statement execute function kiwi_files_come_first();
create trigger files_never_change before update on tool_version_files for each row
  execute function kiwi_refuse('a published version never changes');
create trigger files_stay before delete on tool_version_files for each row
  execute function kiwi_refuse('a published version stays: yank it instead');
create trigger files_are_not_emptied before truncate on tool_version_files
  execute function kiwi_refuse('a published version stays: yank it instead');

create trigger blobs_never_change before update on blobs for each row
  execute function kiwi_refuse('a blob never changes');
create trigger blobs_of_versions_stay before delete on blobs for each row execute function kiwi_blob_is_free();
create trigger blobs_are_not_emptied before truncate on blobs
  execute function kiwi_refuse('a published version needs its blobs');

create trigger log_never_changes before update on registry_log for each row
  execute function kiwi_refuse('the log is only added to');
create trigger log_stays before delete on registry_log for each row
  execute function kiwi_refuse('the log is only added to');
create trigger log_is_not_emptied before truncate on registry_log
  execute function kiwi_refuse('the log is only added to');

insert into namespaces (namespace, owner) values ('kiwi', 'kiwi'), ('public', 'kiwi');

insert into tool_types (tool_type, executor_rule) values
  ('primitive', 'forbidden'), ('runtime', 'required'), ('mcp_server', 'required'), ('mcp_tool', 'required'),
  ('script', 'required'), ('api', 'required'), ('directive', 'required'), ('thread', 'required'),
  ('knowledge', 'forbidden'), ('composite', 'optional');
