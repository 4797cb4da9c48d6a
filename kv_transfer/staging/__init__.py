"""Hand-offs by way of staging slots in the host's memory, for blocks that the transport cannot register.

host_buffer      the connector; its two sides are `offers` and `receives`
copy_thread      copies between blocks and slots, in order
group_copies     the same on all ranks of a group
"""
