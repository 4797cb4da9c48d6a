"""Between an engine's blocks and the host's memory: copies, places that stand in for blocks."""
