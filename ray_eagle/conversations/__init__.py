"""Prompts in, conversations out: what the target itself says, as exact token ids with a supervised mask."""
