-- What searches have worked out of texts, by the digest of each text: its stems with their impacts, and its vector, which
-- may come later. A cache: losing it costs time and nothing else. `used_on` counts days since 1970.

create table sheets (
  digest bytea primary key,
  words bytea not null,
  vector bytea not null,
  used_on integer not null
);
create index idx_sheets_used on sheets (used_on);

-- The latest version of every item, as it is searched on the server. One table holds items of every type, because one
-- request asks for all of them. What stands here twice (namespace, visibility, type, category, tags) is what searches
-- filter by while they walk an index. `dim` is 0 as long as there is no vector.

drop table directive_embeddings;
drop table knowledge_embeddings;
delete from tool_embeddings;
alter table tool_embeddings
  alter column embedding drop not null,
  alter column fts set not null,
  -- What is read of thousands of rows stays in them; what is read of the few that are found lies beside them.
  alter column fts set storage main,
  add column version_id uuid not null references tool_versions (id),
  add column namespace text collate "C" not null,
  add column visibility text collate "C" not null,
  add column tool_type text collate "C" not null,
  add column category text collate "C" not null,
  add column tags text[] not null,
  add column lengths integer[] not null,
  add column words bytea not null,
  add column vector bytea not null;
alter table tool_embeddings alter column words set storage external, alter column vector set storage external;
alter table tool_embeddings set (toast_tuple_target = 1024);
create index idx_tool_embeddings_namespace on tool_embeddings (namespace, model);

create view directive_embeddings as
  select tool_id, model, dim, text_hash, embedding, fts from tool_embeddings where tool_type = 'directive';
create view knowledge_embeddings as
  select tool_id, model, dim, text_hash, embedding, fts from tool_embeddings where tool_type = 'knowledge';

create function kiwi_search_sees_alike() returns trigger language plpgsql as $$
begin
  update tool_embeddings set visibility = new.visibility where tool_id = new.id;
  return null;
end $$;
create trigger searches_see_alike after update of visibility on tools for each row
  when (new.visibility is distinct from old.visibility) execute function kiwi_search_sees_alike();

-- How many items a model knows, how long the fields of their texts are together, and how many of them hold each lexeme:
-- what tells rare words from common ones, and long texts from short ones.
create table embedding_models (
  model text collate "C" primary key,
  total bigint not null,
  lengths bigint[] not null,
  used_on integer not null
);
create table embedding_lexemes (
  model text collate "C" not null,
  lexeme text collate "C" not null,
  held bigint not null,
  primary key (model, lexeme)
) with (fillfactor = 70);
