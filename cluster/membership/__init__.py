"""The members of an application: the directory, its list of members, and the draining of a group."""
