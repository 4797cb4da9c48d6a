"""Groups over torch.distributed: gloo on CPUs, NCCL on GPUs.

Process groups are created without `init_process_group`, because one process may be a member of several engines.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions  # which `torch.distributed` does not export

from .groups import ALL_ALONE, ALONE, CollectiveFailed, ExpertSpread, Group, GroupFailed, ParallelGroups
from .member import Member
from .rendezvous import RendezvousClient
from .symmetric import with_peer_memory

logger = logging.getLogger(__name__)


class TorchGroup(Group):
    """A group of torch.distributed. gloo and NCCL reduce each element in one place, so all ranks get equal bits."""

    def __init__(self, tensors: Any, integers: Any) -> None:
        """Create it from two process groups: `tensors` for device tensors, `integers` for `all_max`."""
        self.rank = tensors.rank()
        self.size = tensors.size()
        self._tensors = tensors
        self._integers = integers
        self._abort: threading.Thread | None = None
        self._closing = threading.Lock()  # two watches may notice a lost member at once
        self._sum = dist.AllreduceOptions()
        self._sum.asyncOp = False  # in the current stream
        self._maximum = dist.AllreduceOptions()
        self._maximum.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel():
            self._run(self._tensors.allreduce, [x], self._sum)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if x.numel():
            self._run(self._tensors._allgather_base, gathered, x.contiguous(), _in_order(AllgatherOptions()))
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        if x.numel():
            self._run(self._tensors._reduce_scatter_base, own, x.contiguous(), _in_order(dist.ReduceScatterOptions()))
        return own

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        options = _in_order(dist.AllToAllOptions())
        self._run(self._tensors.alltoall_base, out, x.contiguous(), list(received), list(sent), options)
        return out

    def all_max(self, values: Sequence[int]) -> list[int]:
        largest = torch.tensor(values, dtype=torch.int64)
        self._run(self._integers.allreduce, [largest], self._maximum)
        return largest.tolist()

    def _run(self, collective: Callable[..., Any], *args: object) -> None:
        try:
            work = collective(*args)
            if work is not None:  # None: it was launched in the current stream
                work.wait()
        except RuntimeError as error:
            raise CollectiveFailed(
                f"rank {self.rank} of {self.size} failed while it waited for the other ranks: {error}"
            ) from error

    def close(self) -> None:
        """Close the group. NCCL ends its kernels at once, but ends itself only when no captured step refers to it.

        This method does not wait for that, because its caller may be the one that must release those steps.
        """
        with self._closing:
            if self._abort is None:
                self._integers.abort()
                self._abort = threading.Thread(target=self._tensors.abort, name="baton-group-abort", daemon=True)
                self._abort.start()

    def wait_closed(self, timeout_s: float) -> None:
        if self._abort is not None:
            self._abort.join(timeout_s)
            if self._abort.is_alive():
                logger.warning("a group of %d ranks has not ended within %g s", self.size, timeout_s)


def _in_order(options: Any) -> Any:
    """Make the operation run in the current stream, rather than in one of the library's own."""
    options.asyncOp = False
    return options


def connect_groups(
    member: Member,
    rendezvous: RendezvousClient | None,
    device: torch.device,
    spread: ExpertSpread | None = None,
    *,
    timeout_s: float = 60.0,
    peer_memory: bool = True,
) -> ParallelGroups:
    """Return the groups of a member, once all other members have arrived.

    If experts are `spread` over all ranks, data-parallel ranks work together. A rank for which a collective of tensors
    waits longer than `timeout_s` has failed; in a captured step there is no such limit. With `peer_memory`, GPUs of one
    machine use each other's memory. Raises `GroupFailed`.
    """
    if rendezvous is None:
        return ALL_ALONE

    connector = GroupConnector(member, rendezvous, device, timeout_s)

    def group(name: str, ranks: Sequence[int], *, through_memory: bool = peer_memory) -> Group:
        if len(ranks) == 1:
            return ALONE
        connected = connector.connect(name, ranks)
        is_served = through_memory and device.type == "cuda"
        return with_peer_memory(name, connected, rendezvous, device) if is_served else connected

    rendezvous.put(f"here/{member.rank}", member.host)
    everyone = list(range(member.world_size))
    for rank in member.tp_ranks if spread is None else everyone:
        rendezvous.get(f"here/{rank}")
    tp = group(f"tp/{member.dp_rank}", member.tp_ranks)
    if spread is None:
        return ParallelGroups(tp)
    dp = group(f"dp/{member.tp_rank}", member.dp_ranks)
    if member.data_parallel_size == 1:
        return ParallelGroups(tp, dp, tp, spread)
    if member.tensor_parallel_size == 1:
        return ParallelGroups(tp, dp, dp, spread)
    # `ep` has a group of its own for integers and for all-to-all, for neither of which peer memory is used.
    return ParallelGroups(tp, dp, group("ep", everyone, through_memory=False), spread)


class GroupConnector:
    """Connects a member with others, in each of its groups.

    All groups share one gloo device, because each device has a thread that wakes eighty times a second even when idle.
    """

    def __init__(self, member: Member, rendezvous: RendezvousClient, device: torch.device, timeout_s: float) -> None:
        self._member = member
        self._rendezvous = rendezvous
        self._device = device
        self._timeout_s = timeout_s
        try:
            self._network = dist.ProcessGroupGloo.create_device(hostname=member.host)
        except RuntimeError as error:
            raise CollectiveFailed(f"gloo cannot listen at {member.host}: {error}") from error

    def connect(self, name: str, ranks: Sequence[int]) -> TorchGroup:
        rank, size = list(ranks).index(self._member.rank), len(ranks)
        try:
            integers = self._gloo(f"{name}/integers", rank, size, self._member.start_timeout_s)
            tensors = self._tensors(f"{name}/tensors", rank, size)
        except GroupFailed:
            raise
        except RuntimeError as error:
            raise CollectiveFailed(f"rank {rank} of {size} cannot connect to the others: {error}") from error
        group = TorchGroup(tensors, integers)
        if self._device.type == "cuda":  # NCCL connects in the first collective, which must not be within a capture
            group.all_reduce(torch.zeros(1, device=self._device))
            torch.cuda.synchronize(self._device)
        return group

    def _tensors(self, name: str, rank: int, size: int) -> Any:
        if self._device.type == "cpu":
            return self._gloo(name, rank, size, self._timeout_s)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        return dist.ProcessGroupNCCL(self._store(name), rank, size, options)

    def _gloo(self, name: str, rank: int, size: int, patience_s: float) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=patience_s)
        options._devices = [self._network]
        return self._rendezvous.run_watched(lambda: dist.ProcessGroupGloo(self._store(name), rank, size, options))

    def _store(self, name: str) -> dist.Store:
        return dist.PrefixStore(name, self._rendezvous.store)
