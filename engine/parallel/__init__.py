"""Several devices for one model. Groups are passed to layers and engines as values; no module holds a global one.

groups        collective operations of a group; the groups of a member; `GroupFailed`
member        a process's place in its group
rendezvous    the store in which members find each other
rank_group    one member's connections to its group, from start to end; wake-ups of data-parallel ranks
collectives   groups over torch.distributed: gloo on CPUs, NCCL on GPUs
symmetric     all-reduces over peer memory, on GPUs of one machine
plans         the transport of steps from the rank that schedules to those that follow
mesh          sockets between members, which also notice that a member has gone; their addresses
watch         liveness of members
placement     the ranks that hold each expert
dispatch      transport of tokens to the experts' ranks, and back

`groups` and `member` load no torch.
"""

from .groups import ALONE, Group, GroupFailed, ParallelGroups
from .member import ALONE_MEMBER, Member

__all__ = ["ALONE", "ALONE_MEMBER", "Group", "GroupFailed", "Member", "ParallelGroups"]
