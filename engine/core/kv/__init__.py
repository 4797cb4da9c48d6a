"""Blocks: who has them, who may still touch them, and their copies to other engines and tiers."""
