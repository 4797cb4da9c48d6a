"""Who belongs to an application: the directory, what it knows, and how a group leaves."""
