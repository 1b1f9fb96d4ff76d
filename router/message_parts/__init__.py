"""From an answer's text to the parts of a chat message: reasoning, content, calls of tools."""
