"""Several devices for one model. Groups are values: layers and engines are given theirs, and no module keeps any.

groups        what members of a group do together; which groups there are
member        a process's place in its group
division      whether a model can be divided as the arguments ask
rendezvous    where the members of a group find each other
collectives   groups over torch.distributed: gloo on CPUs, NCCL on GPUs
symmetric     sums over the memory of peers, on GPUs of one machine
plans         steps on their way from the rank that schedules to those that follow
launch        the other members on this machine, for an engine without a server

`groups`, `member` and `division` load no torch.
"""

from .errors import GroupFailed
from .groups import ALONE, Group, ParallelGroups
from .member import ALONE_MEMBER, Member

__all__ = ["ALONE", "ALONE_MEMBER", "Group", "GroupFailed", "Member", "ParallelGroups"]
