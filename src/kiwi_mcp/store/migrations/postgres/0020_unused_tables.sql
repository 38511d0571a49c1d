-- Nothing reads these views: `tool_embeddings` has items of every type.
drop view directive_embeddings;
drop view knowledge_embeddings;
