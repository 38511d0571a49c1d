-- Small numbers for questions, counted for each owner: a number is never used again.

alter table approvals add column number bigint not null default 0;
update approvals set number = (
  select count(*) from approvals as earlier where earlier.owner = approvals.owner and earlier.id <= approvals.id
);
create index idx_approvals_number on approvals (owner, number);

create table approval_numbers (
  owner text collate "C" primary key,
  last bigint not null
);
insert into approval_numbers (owner, last) select owner, max(number) from approvals group by owner;
