"""One request: its states, its grammar, its drafts, its end, and its outputs."""
