"""Hand-offs through staging slots in host memory, for blocks that the transport cannot register.

host_buffer      the connector; `offers` is its holder's side, `receives` its reader's side
copy_thread      a thread that copies between blocks and slots, in order
group_copies     the same copies on all ranks of a group
slots            slots in host memory, and which of them are free
"""
