"""The prefill scheduler: what it lends and for how long, and which prompts it shortens."""
