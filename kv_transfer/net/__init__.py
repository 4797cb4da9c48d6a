"""How engines reach each other: a channel for small messages, its key, its silence; a fake of it in virtual time."""
