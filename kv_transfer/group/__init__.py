"""The ranks of one tensor-parallel group: rank 0 sends orders, the other ranks carry them out and report.

rpc              sockets, joining, orders and reports, for every service; and `TpCopyGroup`, with which rank 0 has
                 all ranks copy their shares of blocks, to staging slots or tiers
tp_read_group    rank 0's side of reads: each rank reads its own KV heads of a peer's blocks (`rank_reader`)
read_member      the other ranks' side of reads
"""
