"""Channels that carry small messages between engines."""
