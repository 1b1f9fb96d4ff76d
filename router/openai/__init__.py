"""OpenAI's API in JSON: request bodies checked field by field, answers, SSE chunks, errors."""
