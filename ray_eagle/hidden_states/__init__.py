"""The Arrow shard format of hidden states (schema, plan, commit, reader, verify) and the actors that fill it."""
