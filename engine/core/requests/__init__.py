"""One request: its states, the tokens that may be drawn, its end, and its outputs."""
