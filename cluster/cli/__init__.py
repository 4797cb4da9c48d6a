"""The `baton` command: one module a command or a few that belong together."""
