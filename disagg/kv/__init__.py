"""KV memory of one worker: specs, layout, block pool, prefix cache, coordinator, events."""
