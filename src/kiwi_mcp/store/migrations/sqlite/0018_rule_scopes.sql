alter table approval_rules add column scope text not null default '';
