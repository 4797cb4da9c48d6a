"""Several devices for one model. Groups are values: layers and engines are given theirs, and no module keeps any.

groups        collective operations of a group; the groups that there are; `GroupFailed`
member        a process's place in its group
rendezvous    members find each other there
rank_group    one member's connections to its group, from start to end; wakes of data-parallel ranks
collectives   groups over torch.distributed: gloo on CPUs, NCCL on GPUs
symmetric     all-reduces over peers' memory, on GPUs of one machine
plans         steps on their way from the rank that schedules to those that follow
mesh          sockets over which some members talk, and notice that another has gone; their addresses
watch         liveness of members
placement     the ranks on which experts lie
dispatch      tokens on their way to the experts' ranks, and back

`groups` and `member` load no torch.
"""

from .groups import ALONE, Group, GroupFailed, ParallelGroups
from .member import ALONE_MEMBER, Member

__all__ = ["ALONE", "ALONE_MEMBER", "Group", "GroupFailed", "Member", "ParallelGroups"]
