"""The policy that a user has chosen."""

from __future__ import annotations

from manyroots.config import Policy
from manyroots.scheduler.policies.fair import FairPolicy
from manyroots.scheduler.policies.fcfs import FcfsPolicy
from manyroots.scheduler.policies.pack import PackPolicy
from manyroots.scheduler.policies.priority import PriorityPolicy
from manyroots.scheduler.policies.protocol import SchedulingPolicy

POLICIES: dict[Policy, type[FcfsPolicy]] = {
    Policy.FCFS: FcfsPolicy,
    Policy.PRIORITY: PriorityPolicy,
    Policy.PACK: PackPolicy,
    Policy.FAIR: FairPolicy,
}


def make_policy(name: str) -> SchedulingPolicy:
    """`name`: as in `--scheduling-policy`, which the settings have checked."""
    return POLICIES[Policy(name)]()
