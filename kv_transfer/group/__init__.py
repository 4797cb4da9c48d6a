"""The ranks of one tensor-parallel group: rank 0 sends orders, the others carry them out and report.

rpc              sockets, joining, orders and reports: the same for every use; and `TpCopyGroup`, all ranks that copy
                 their shares of blocks: to staging slots, or to tiers
tp_read_group    all ranks read their own KV heads of a peer's blocks (`rank_reader`), seen from rank 0
read_member      the same on another rank
"""
