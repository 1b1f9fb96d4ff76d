"""Worker shell: engine, NIXL transport, gRPC service, Ray actor."""
