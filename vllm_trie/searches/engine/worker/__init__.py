"""Native beam search in a worker: copies of KV blocks, candidates of rows."""
