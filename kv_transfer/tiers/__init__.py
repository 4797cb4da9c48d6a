"""Tiers of memory behind an engine's pool of blocks: the host's, then a disk's. See docs/concepts/kv_tiers.md.

EngineCore ── TierCopies ──KVTiers──> TierStore ── TierIndex         in the step's thread: which block is in which slot
                                          └─moves──> TierWorker      in a thread of its own: copies, files
"""
