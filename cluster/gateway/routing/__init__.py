"""The choice of an engine for a request: costs, load, cached prefixes, circuits."""
