"""The autoscaler of one application, in its directory: it takes reports, decides sizes, and chooses groups to end.

gateways, replicas ── reports ──> Scaler ── wanted ──> serve_policy, in Serve's controller
                                     └── leave ──> the group with the least to lose, which drains

Serve would choose the replica to stop by age and node. So Serve learns that a fleet shrinks only when the group
that was chosen here has drained and its replica is gone; until then it may be asked to stay.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from baton.cluster.contracts import EngineGroup, EnginePulse, Role, ScalePlan

from .load_samples import GatewayLoad, LoadReports, Sample
from .policy import Moment, decide, desired_sizes

logger = logging.getLogger(__name__)

GONE_S = 60.0  # for which a group that left is still named: Serve takes seconds to notice


class FleetTarget(msgspec.Struct, frozen=True):
    """The size that one fleet is to have."""

    replicas: int
    leaving: list[str]  # groups that count in addition while their replicas exist


class Scaler:
    """Takes samples, and keeps the decisions. Plain data: no Ray, no clock of its own."""

    def __init__(self, plan: ScalePlan) -> None:
        self.plan = plan
        self._loads = LoadReports()
        self._history: deque[Moment] = deque()
        fixed = {role: each for role, each in plan.fleets.items() if each.min_replicas == each.max_replicas}
        self._decided = {role: each.min_replicas for role, each in fixed.items()}
        self._leaving: dict[
            str, tuple[Role, float]
        ] = {}  # groups, in the order in which they were chosen, and when they were last listed

    def update_gateway(self, identity: str, load: GatewayLoad) -> None:
        self._loads.update_gateway(identity, load)

    def update_group(self, group: EngineGroup, pulses: list[EnginePulse]) -> None:
        self._loads.update_group(group, pulses)

    def start_from(self, replicas: dict[Role, int]) -> None:
        """Take Serve's present sizes for the decision, where nothing was decided yet."""
        for role, count in replicas.items():
            self._decided.setdefault(role, count)

    def wanted(self, role: Role) -> FleetTarget | None:
        """Return the target of a fleet; None where nothing is decided yet."""
        if role not in self._decided:
            return None
        leaving = [group_id for group_id, (its_role, _) in self._leaving.items() if its_role is role]
        return FleetTarget(self._decided[role], leaving)

    def update(self, now_s: float, gateways: Iterable[str], groups: Sequence[EngineGroup]) -> dict[str, bool]:
        """Take a sample and decide, once a second. Return the groups that are to leave (True), or after all to stay."""
        self._remember(self._loads.sample(now_s, gateways, groups))
        if self._decided.keys() != self.plan.fleets.keys():
            return {}
        decided = decide(list(self._history), self.plan, now_s, self._decided)
        for role, count in decided.items():
            if count != self._decided[role]:
                logger.info("%s: %d groups instead of %d", role, count, self._decided[role])
        self._forget_gone(now_s, groups)
        orders: dict[str, bool] = {}
        for role, count in decided.items():
            more = count - self._decided[role]
            own = [group for group in groups if group.engines[0].role is role]
            orders |= self._keep(own, more) if more > 0 else self._let_go(own, count, -more, now_s)
        self._decided = decided
        return orders

    def _remember(self, sample: Sample) -> None:
        since_s = sample.at_s - self.plan.look_back_period_s
        newest_first = (moment.sample for moment in reversed(self._history))
        window = [*itertools.takewhile(lambda each: each.at_s >= since_s, newest_first)][::-1]
        self._history.append(Moment(sample, desired_sizes([*window, sample], self.plan)))
        while self._history[0].sample.at_s < sample.at_s - self.plan.memory_s:
            self._history.popleft()

    def _forget_gone(self, now_s: float, groups: Sequence[EngineGroup]) -> None:
        listed = {group.group_id for group in groups}
        for group_id, (role, seen_s) in list(self._leaving.items()):
            if group_id in listed:
                self._leaving[group_id] = (role, now_s)
            elif now_s - seen_s > GONE_S:
                del self._leaving[group_id]

    def _let_go(self, own: Sequence[EngineGroup], count: int, fewer: int, now_s: float) -> dict[str, bool]:
        """Choose the groups with the fewest live requests in a fleet that is to have `count`, `fewer` than before.

        Groups that have not started yet are Serve's to stop.
        """
        staying = [group for group in own if group.group_id not in self._leaving and not group.draining]
        staying.sort(key=lambda group: self._loads.num_live(group.group_id))
        chosen = staying[: min(fewer, max(0, len(staying) - count))]
        for group in chosen:
            self._leaving[group.group_id] = (group.engines[0].role, now_s)
        return {group.group_id: True for group in chosen}

    def _keep(self, own: Sequence[EngineGroup], more: int) -> dict[str, bool]:
        """Let groups stay that were to leave, the last one first: that is quicker than to start new ones."""
        listed = {group.group_id for group in own}
        chosen = [group_id for group_id in reversed(self._leaving) if group_id in listed][:more]
        for group_id in chosen:
            del self._leaving[group_id]
        return dict.fromkeys(chosen, False)


def scaler_for(plan: ScalePlan | None, current: Scaler | None) -> Scaler | None:
    """Return the scaler for a plan: the current one, with what it has measured, where only targets have changed."""
    if plan is None:
        return None
    if current is None or current.plan.fleets != plan.fleets:
        return Scaler(plan)
    current.plan = plan
    return current
