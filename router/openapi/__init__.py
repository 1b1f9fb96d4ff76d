"""What the pages of a port take and answer, as an OpenAPI document."""
