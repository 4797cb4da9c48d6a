"""One request: its states, the tokens that may be drawn, guesses of the next ones, its end, and its outputs."""
