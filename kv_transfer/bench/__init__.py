"""`tandem kv bench`: how fast the connectors move KV between two processes, beside the raw link under each."""
