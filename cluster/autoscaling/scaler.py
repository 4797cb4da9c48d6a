"""The autoscaler of one application, in its directory: takes reports, decides fleet sizes, chooses groups to stop.

gateways, replicas ── reports ──> Scaler ── wanted ──> serve_policy, in Serve's controller
                                     └── leave ──> the group with the least to lose, which drains

Left alone, Serve would choose the replica to stop by age and node. So Baton chooses the group, and reports the smaller
size to Serve only when that group has drained and its replica is gone; until then the group may be told to stay.
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

GONE_S = 60.0  # a group that has left is still reported to Serve for so long: Serve takes seconds to notice


class FleetTarget(msgspec.Struct, frozen=True):
    """The size that one fleet is to have, as Serve's policy gets it."""

    replicas: int
    leaving: list[str]  # groups to be counted in addition to `replicas` while their Serve replicas exist


class Scaler:
    """Takes samples and keeps the decisions. It uses neither Ray nor a clock of its own."""

    def __init__(self, plan: ScalePlan) -> None:
        self.plan = plan
        self._loads = LoadReports()
        self._history: deque[Moment] = deque()
        fixed = {role: each for role, each in plan.fleets.items() if each.min_replicas == each.max_replicas}
        self._decided = {role: each.min_replicas for role, each in fixed.items()}
        # Groups that were told to leave, in that order, with the time at which each was last listed.
        self._leaving: dict[str, tuple[Role, float]] = {}

    def update_gateway(self, identity: str, load: GatewayLoad) -> None:
        self._loads.update_gateway(identity, load)

    def update_group(self, group: EngineGroup, pulses: list[EnginePulse]) -> None:
        self._loads.update_group(group, pulses)

    def start_from(self, replicas: dict[Role, int]) -> None:
        """Begin with Serve's present sizes in fleets for which nothing has been decided yet."""
        for role, count in replicas.items():
            self._decided.setdefault(role, count)

    def wanted(self, role: Role) -> FleetTarget | None:
        """Return the target of a fleet; None if nothing has been decided yet."""
        if role not in self._decided:
            return None
        leaving = [group_id for group_id, (its_role, _) in self._leaving.items() if its_role is role]
        return FleetTarget(self._decided[role], leaving)

    def update(self, now_s: float, gateways: Iterable[str], groups: Sequence[EngineGroup]) -> dict[str, bool]:
        """Take a sample and decide; called once a second.

        Return orders by group id: True tells a group to leave, False tells one that was leaving to stay.
        """
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
        """Choose the groups that leave a fleet, those with the fewest live requests first.

        The fleet is to have `count` groups, `fewer` than before. Serve itself stops groups that have not started yet.
        """
        staying = [group for group in own if group.group_id not in self._leaving and not group.draining]
        staying.sort(key=lambda group: self._loads.num_live(group.group_id))
        chosen = staying[: min(fewer, max(0, len(staying) - count))]
        for group in chosen:
            self._leaving[group.group_id] = (group.engines[0].role, now_s)
        return {group.group_id: True for group in chosen}

    def _keep(self, own: Sequence[EngineGroup], more: int) -> dict[str, bool]:
        """Let leaving groups stay, the last one chosen first: that is quicker than starting new ones."""
        listed = {group.group_id for group in own}
        chosen = [group_id for group_id in reversed(self._leaving) if group_id in listed][:more]
        for group_id in chosen:
            del self._leaving[group_id]
        return dict.fromkeys(chosen, False)


def scaler_for(plan: ScalePlan | None, current: Scaler | None) -> Scaler | None:
    """Return the scaler for a plan: the current one with its measurements if the bounds of all fleets are the same."""
    if plan is None:
        return None
    if current is None or current.plan.fleets != plan.fleets:
        return Scaler(plan)
    current.plan = plan
    return current
