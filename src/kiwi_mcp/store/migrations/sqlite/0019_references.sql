-- What each name in an item's config meant when a version was published: [[name, namespace, item, version, digest]].
-- Versions from before have none, and their closures keep their form.
alter table tool_versions add column item_references text not null default '[]';

create trigger references_are_sealed before update on tool_versions
when new.item_references is not old.item_references
begin select raise(abort, 'a published version never changes'); end;
