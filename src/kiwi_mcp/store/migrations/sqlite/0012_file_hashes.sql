-- A registry is served as an OCI image layout, in which every file is found by its hash.

create index idx_tool_files_hash on tool_version_files (sha256);
create index idx_tool_versions_manifest on tool_versions (manifest_sha256) where manifest_sha256 is not null;
