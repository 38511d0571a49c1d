-- Questions to the owner, and their answers: each is about one plan of one actor, and a yes is good for one run. Times
-- are milliseconds since 1970. Digests of what a model wrote are known here once an owner let them run, and standing
-- rules are yeses that the owner gave beforehand. `owner` is whose they are: a store may have several users.

create table approvals (
  id text primary key not null,
  owner text not null,
  actor text not null,
  project text not null,
  plan_digest text not null,
  identity text not null,
  reasons text not null,
  plan text not null,
  preview text not null,
  touched text not null,
  first_runs text not null,
  request text not null,
  content text not null,
  status text not null check (status in ('pending', 'approved', 'denied', 'expired', 'used')),
  created_at integer not null,
  expires_at integer not null,
  decided_at integer not null,
  decided_by text not null,
  decided_how text not null,
  reason text not null,
  run_id text not null
) without rowid;
create unique index idx_approvals_pending on approvals (owner, actor, project, plan_digest) where status = 'pending';
create index idx_approvals_plan on approvals (owner, actor, plan_digest);
create index idx_approvals_created on approvals (owner, created_at);

create table approval_rules (
  id text primary key not null,
  owner text not null,
  item text not null,
  actor text not null,
  paths text not null,
  hosts text not null,
  argv text not null,
  created_at integer not null,
  created_by text not null,
  expires_at integer,
  project text not null,
  digest text not null
) without rowid;
create index idx_approval_rules_owner on approval_rules (owner, created_at);

create table first_runs (
  owner text not null,
  digest text not null,
  approval text not null,
  at integer not null,
  primary key (owner, digest)
) without rowid;
