"""The demo's checkpoint, trained from configuration, and the prompts it is asked."""
