"""Router shell: HTTP front, gRPC services, tokenizer, worker clients."""
