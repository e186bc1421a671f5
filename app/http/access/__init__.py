"""Access control: grants from API keys and networks, and delayed answers to callers that guess keys."""
