"""The engine over vLLM's model runner; its scheduler and KV managers never run."""
