-- One row counts the changes of every table that decides what an item is and what it may do. A process that remembers
-- such rows reads the counter at each call. It changes in the transaction of the change, so that both are seen at once.
-- Runs, receipts, tasks, results and what searches worked out are not counted: calls write them all the time.

create table change_counter (
  id integer primary key check (id = 1),
  value bigint not null
);
insert into change_counter (id, value) values (1, 1);

create function kiwi_count_change() returns trigger language plpgsql as $$
begin
  update change_counter set value = value + 1;
  return null;
end $$;

create trigger changes_are_counted after insert or update or delete or truncate on namespaces
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on tool_types
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on tools
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on tool_versions
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on tool_version_files
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on registry_log
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on remotes
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on mcp_servers
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on mcp_definitions
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on authors
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on relaxations
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on approval_rules
  for each statement execute function kiwi_count_change();
create trigger changes_are_counted after insert or update or delete or truncate on first_runs
  for each statement execute function kiwi_count_change();
