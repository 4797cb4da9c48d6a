"""Several devices for one model. Groups are values: layers and engines are given theirs, and no module keeps any.

groups        what members of a group do together; which groups there are
member        a process's place in its group
division      whether a model can be divided as the arguments ask
rendezvous    where the members of a group find each other
membership    a member's ties to its group, from its start to its end
collectives   groups over torch.distributed: gloo on CPUs, NCCL on GPUs
symmetric     sums over the memory of peers, on GPUs of one machine
plans         steps on their way from the rank that schedules to those that follow
waves         how a data-parallel rank that gets work wakes the others
links         sockets over which some members talk, and hear that another has gone
addresses     where those sockets are
watch         how a member knows that another lives
placement     which experts lie on which rank
dispatch      tokens on their way to the experts' ranks, and back
balance       moves experts to where their tokens are shared out evenly
errors        what can go wrong between members
measure_plans what a plan takes from rank to rank: a command

`groups`, `member` and `division` load no torch.
"""

from .errors import GroupFailed
from .groups import ALONE, Group, ParallelGroups
from .member import ALONE_MEMBER, Member

__all__ = ["ALONE", "ALONE_MEMBER", "Group", "GroupFailed", "Member", "ParallelGroups"]
