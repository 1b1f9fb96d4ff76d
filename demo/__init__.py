"""The demo's checkpoint, trained from configuration, and its prompts."""
