"""The members of an application: the directory, the list that it keeps, and how a group leaves."""
