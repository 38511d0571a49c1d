-- Questions to the owner, and their answers: each is about one plan of one actor, and a yes is good for one run. Times
-- are milliseconds since 1970. Digests of what a model wrote are known here once an owner let them run, and standing
-- rules are yeses that the owner gave beforehand. `owner` is whose they are: a store may have several users.

create table approvals (
  id text collate "C" primary key,
  owner text collate "C" not null,
  actor text collate "C" not null,
  project text collate "C" not null,
  plan_digest text collate "C" not null,
  identity text collate "C" not null,
  reasons text collate "C" not null,
  plan text collate "C" not null,
  preview text collate "C" not null,
  touched text collate "C" not null,
  first_runs text collate "C" not null,
  request text collate "C" not null,
  content text collate "C" not null,
  status text collate "C" not null check (status in ('pending', 'approved', 'denied', 'expired', 'used')),
  created_at bigint not null,
  expires_at bigint not null,
  decided_at bigint not null,
  decided_by text collate "C" not null,
  decided_how text collate "C" not null,
  reason text collate "C" not null,
  run_id text collate "C" not null
);
create unique index idx_approvals_pending on approvals (owner, actor, project, plan_digest) where status = 'pending';
create index idx_approvals_plan on approvals (owner, actor, plan_digest);
create index idx_approvals_created on approvals (owner, created_at);

create table approval_rules (
  id text collate "C" primary key,
  owner text collate "C" not null,
  item text collate "C" not null,
  actor text collate "C" not null,
  paths text collate "C" not null,
  hosts text collate "C" not null,
  argv text collate "C" not null,
  created_at bigint not null,
  created_by text collate "C" not null,
  expires_at bigint,
  project text collate "C" not null,
  digest text collate "C" not null
);
create index idx_approval_rules_owner on approval_rules (owner, created_at);

create table first_runs (
  owner text collate "C" not null,
  digest text collate "C" not null,
  approval text collate "C" not null,
  at bigint not null,
  primary key (owner, digest)
);
