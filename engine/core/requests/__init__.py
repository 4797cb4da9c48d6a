"""One request: its states, what may be drawn for it, when it is over, what is said of it."""
