"""What a plan means in hours, money and lost work: a token budget, checkpoints, and failures."""

from dataclasses import dataclass
from math import sqrt

from expertmesh.planning.search import Candidate, Job
from expertmesh.planning.state import state_of

RESTART_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Economics:
    """Of one candidate. `checkpoint_bytes` is the whole job's; `interval_seconds` the best time between checkpoints
    (Young's rule), `lost` the share of time that failures and checkpoints then cost. `hours` and `cost` are for the
    token budget, with what is lost; None without a budget or a price.
    """

    checkpoint_bytes: float
    save_seconds: float
    hours_between_failures: float
    interval_seconds: float
    lost: float
    hours: float | None
    device_hours: float | None
    cost: float | None


def economics_of(
    job: Job, candidate: Candidate, tokens: float | None, price: float | None, device_hours_per_failure: float | None
) -> Economics:
    """`tokens` is the budget, `price` that of a device and hour; it and `device_hours_per_failure` default to the
    hardware table's.
    """
    hardware, layout = job.devices.hardware, candidate.layout
    kept = sum(state_of(job.facts, layout, stage).master for stage in range(layout.pp))
    size = kept * (1 + job.optimizer_moments) * layout.world_size / layout.replicate / layout.pp
    # The ranks of one copy write, each node at its own pace; training stands still only while the state is copied out.
    nodes = max(1.0, job.devices.nodes / layout.replicate)
    save = size / (nodes * hardware.storage)
    between = (device_hours_per_failure or hardware.hours_between_failures) / job.devices.count * 3600
    interval = sqrt(2 * save * between)
    lost = min(0.99, save / interval + (interval / 2 + RESTART_SECONDS) / between)
    hours = device_hours = cost = None
    if tokens is not None:
        hours = tokens / candidate.speed.tokens * candidate.speed.seconds / 3600 / (1 - lost)
        device_hours = hours * job.devices.count
        rate = price if price is not None else hardware.price
        cost = None if rate is None else device_hours * rate
    return Economics(size, save, between / 3600, interval, lost, hours, device_hours, cost)
