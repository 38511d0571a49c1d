-- Vectors are in `sheets`; nothing ever read or wrote these tables.
drop table directive_embeddings;
drop table tool_embeddings;
drop table knowledge_embeddings;
