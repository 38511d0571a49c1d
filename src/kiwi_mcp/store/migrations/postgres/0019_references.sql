-- What each name in an item's config meant when a version was published: [[name, namespace, item, version, digest]].
-- Versions from before have none, and their closures keep their form.
alter table tool_versions add column item_references text collate "C" not null default '[]';

create trigger references_are_sealed before update on tool_versions for each row
  when (new.item_references is distinct from old.item_references)
  execute function kiwi_refuse('a published version never changes');
