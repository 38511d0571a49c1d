-- What the manifest of an MCP server said when its owner added or accepted it: shown beside what it says later. It is
-- empty where no owner ever said so, and for servers that were accepted before this column was there.

alter table mcp_servers add column words text not null default '{}';
