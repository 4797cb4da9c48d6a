"""Tiers behind an engine's pool of blocks: host memory, then a disk. See docs/concepts/kv_tiers.md.

EngineCore ── TierCopies ──KVTiers──> TierStore ── TierIndex         in the step loop: which block is in which slot
                                          └─moves──> TierWorker      in a thread of its own: copies, files
"""
