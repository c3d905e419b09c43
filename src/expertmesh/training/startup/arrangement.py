"""Choose the layout of ranks for an elastic start, and check that the whole job can run, before anything is built.

Rank 0 decides for an elastic start; all ranks get the same.
"""

import json
import logging
from collections.abc import Callable

import torch.distributed as dist

from expertmesh.config import Config, ParallelConfig
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.io.terminal import plural
from expertmesh.training.reporting.record import Arrangement
from expertmesh.training.startup.model_check import Checked
from expertmesh.training.startup.preflight import preflight, refuse_weights

log = logging.getLogger(__name__)

Arrange = Callable[[Config, int, Callable[[Config, int], Checked]], Arrangement]


def check(config: Config) -> Checked:
    """Run `preflight` for this job's ranks; rank 0 checks the weights' files as well, before data are tokenized."""
    checked = preflight(config, dist.get_world_size())
    if dist.get_rank() == 0:
        refuse_weights(checked)
    return checked


def arranged(config: Config, arrange: Arrange) -> Config:
    """Return `config` with the layout that `arrange` chooses on rank 0 for this number of ranks.

    Collectives: every rank calls it; one broadcast and one small all-reduce.
    """
    said = ""
    with raise_on_all_ranks("choosing a layout"):
        if dist.get_rank() == 0:
            found = arrange(config, dist.get_world_size(), preflight)
            log.info(f"elastic    {plural(dist.get_world_size(), 'rank')}: {found.reason}")
            batch: dict[str, object] = {"micro_batch_size": found.micro_batch_size}
            batch |= {"activation_checkpointing": found.activation_checkpointing}
            said = json.dumps({"parallel": found.parallel.model_dump(mode="json"), "train": batch})
    changes = json.loads(from_rank_0(said))
    train = config.train.model_copy(update=changes["train"])
    return config.model_copy(update={"parallel": ParallelConfig(**changes["parallel"]), "train": train})
