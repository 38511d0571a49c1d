alter table approval_rules add column scope text collate "C" not null default '';
