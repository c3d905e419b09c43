"""The data of a run on every rank: found prepared, or tokenized by all ranks of each node together.

A node's ranks write into one directory there; nodes that share a file system each write their own, and the first that
is whole stays.
"""

import datetime
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from expertmesh.config import Config
from expertmesh.data import (
    DataReport,
    Mixture,
    Preparation,
    PreparedData,
    Ranks,
    Recipe,
    Stream,
    TokenizedDataset,
    load_tokenizer,
    padding_token_id,
)
from expertmesh.data.sources import Share
from expertmesh.distributed.all_ranks import (
    from_rank_0,
    object_from_rank_0,
    objects_of_all_ranks,
    raise_on_all_ranks,
    sum_over_ranks,
)
from expertmesh.training.startup.model_check import Checked

_SECONDS_BETWEEN_LINES = 10.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run; `evaluation` by the name of the set, `reports` of the training data and then of each of these.
    `date` is the one that chat templates write. With a `stream`, `training` and its report are of its first rows.
    """

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    training: TokenizedDataset
    evaluation: Mapping[str, TokenizedDataset]
    reports: tuple[DataReport, ...]
    date: datetime.date
    mixture: Mixture | None
    stream: Stream | None = None

    @property
    def datasets(self) -> list[TokenizedDataset]:
        return [self.training, *self.evaluation.values()]


def read_data(config: Config, checked: Checked, date: datetime.date | None, say: Callable[[str], None]) -> RunData:
    """Every rank calls it. `date` is that of the run that goes on; None lets prepared tokens keep theirs."""
    say("reading the data")
    with raise_on_all_ranks("loading the tokenizer"):
        tokenizer = load_tokenizer(config.model, config.data.chat_template)
    stream, found, reports = None, [], []
    train = Recipe.of(config, config.data.train, tokenizer, checked.vocab_size, date)
    if config.data.stream:
        say("reading the first rows of the stream")
        # A stream is not kept, so what its template writes is that of the first start.
        date = date or datetime.date.today()
        stream = Stream(replace(train, date=date), config.train.seed, _ranks())
        window = stream.first()
        found.append(window.dataset)
        reports.append(window.report)
    sets = config.data.eval_sets()
    recipes = {} if stream else {"data.train": train}
    recipes |= {f"data.eval {name}".strip(): replace(train, sources=sources) for name, sources in sets.items()}
    for name, recipe in recipes.items():
        prepared = _on_all_ranks(name, Preparation.of(config, replace(recipe, date=date)), say)
        found.append(prepared.dataset)
        reports.append(prepared.report)
        date = date or prepared.date or datetime.date.today()
    assert date is not None
    return RunData(
        tokenizer,
        padding_token_id(tokenizer, checked.vocab_size),
        found[0],
        dict(zip(sets, found[1:], strict=True)),
        tuple(reports),
        date,
        None if stream else Mixture.of(config.data.train, reports[0], found[0].samples_per_row),
        stream,
    )


def _ranks() -> Ranks:
    """All of the job, for a stream."""
    rank, count = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, count, object_from_rank_0, objects_of_all_ranks, raise_on_all_ranks)


def _on_all_ranks(name: str, preparation: Preparation, say: Callable[[str], None]) -> PreparedData:
    """The tokens, which are made now if one rank does not find them."""
    with raise_on_all_ranks("looking for prepared data"):
        found = preparation.find()
    if not int(sum_over_ranks(torch.tensor([found is None])).item()):
        assert found is not None
        say(f"{name} is prepared: {found.directory}")
        return found
    hosts = [""] * dist.get_world_size()
    boot_id = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    dist.all_gather_object(hosts, f"{socket.gethostname()} {boot_id}")
    here = [rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()]]
    share = Share(here.index(dist.get_rank()), len(here))
    building = preparation.building(f"{from_rank_0(uuid.uuid4().hex)}-{here[0]}")
    stale = ", as its rows have changed since it was prepared" if preparation.is_stale() else ""
    say(f"tokenizing {name}{stale}")
    with raise_on_all_ranks("tokenizing the data"):
        preparation.write_share(building, share, _progress(lambda what: say(f"tokenizing {name}: {what}"), len(hosts)))
    with raise_on_all_ranks("joining the tokens"):
        if share.index == 0:
            preparation.finish(building, share.count)
    with raise_on_all_ranks("opening the prepared data"):
        found = preparation.find()
        assert found is not None
    say(f"{name} is prepared: {found.directory}")
    return found


def _progress(say: Callable[[str], None], ranks: int) -> Callable[[int], None]:
    """Says how far the ranks are and how fast, if all of them are as fast as this one."""
    began = said = time.monotonic()
    rows = 0

    def told(more: int) -> None:
        nonlocal rows, said
        rows, now = rows + more, time.monotonic()
        if now - said >= _SECONDS_BETWEEN_LINES:
            said = now
            speed = rows * ranks / (now - began)
            say(f"about {rows * ranks:,} rows, {speed:,.0f} rows/s")

    return told
