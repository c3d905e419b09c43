"""Read the data of a run on every rank: find them prepared, or tokenize them with all ranks of each node together.

A node's ranks write into one directory there. Nodes that share a file system each write their own, and the first
complete one stays.
"""

import datetime
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertmesh.anatomy import is_classifier
from expertmesh.config import Config, InputError
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
from expertmesh.data.images import Images
from expertmesh.data.sources import RowShare
from expertmesh.distributed.all_ranks import (
    from_rank_0,
    gather_objects,
    raise_on_all_ranks,
    sum_over_ranks,
)
from expertmesh.io.terminal import counted
from expertmesh.parallel.pipeline import not_by_layer
from expertmesh.step.forward_backward import Order
from expertmesh.step.pipeline_schedule import takes_text_alone
from expertmesh.training.lock import RunLock
from expertmesh.training.startup.model_check import Checked

_SECONDS_BETWEEN_LOOKS = 2.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# Of keys that rows with images exclude: the values with which they go, why others do not, and the cure.
_OFF_WITH_IMAGES: dict[str, tuple[object, str, str]] = {
    "data.packing": (False, "whose positions are not kept apart in packed rows", "set it to false"),
    "parallel.cp": (1, "whose positions it is not proven to split", "set it to 1"),
    "parallel.tp": (1, "whose positions it is not proven to split", "set it to 1"),
    "objective.name": ("sft", "which only sft trains on", "set it to sft, or leave images out"),
    "eval.samples": (0, "which answers are not generated to", "set it to 0"),
}


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run."""

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    training: TokenizedDataset
    """Training samples; with a `stream` those of its first rows."""
    evaluation: Mapping[str, TokenizedDataset]
    """Samples by the name of the set."""
    reports: tuple[DataReport, ...]
    """The report of the training data, then that of each evaluation set."""
    date: datetime.date
    """The date that chat templates write."""
    mixture: Mixture | None
    images: Images | None
    """Pixels of the images of rows; None if no row has any."""
    stream: Stream | None = None

    @property
    def datasets(self) -> list[TokenizedDataset]:
        return [self.training, *self.evaluation.values()]


def read_data(config: Config, checked: Checked, date: datetime.date | None, say: Callable[[str], None]) -> RunData:
    """Read the data. Every rank calls it. `date`: of the run that goes on; None lets prepared tokens keep theirs."""
    say("reading the data")
    with raise_on_all_ranks("loading the tokenizer"):
        tokenizer = load_tokenizer(config.model, config.data.chat_template)
    stream, found, reports = None, [], []
    train = Recipe.of(config, config.data.train, tokenizer, (checked.model_config, checked.directory), date)
    if config.data.stream:
        say("reading the first rows of the stream")
        # A stream is not kept, so what its template writes is that of the first start.
        date = date or _today()
        job = dist.get_rank(), dist.get_world_size()
        ranks = Ranks(*job, from_rank_0, gather_objects, raise_on_all_ranks)
        stream = Stream(replace(train, date=date), config.train.seed, ranks)
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
        date = date or prepared.date or _today()
    assert date is not None
    return RunData(
        tokenizer,
        padding_token_id(tokenizer, checked.vocab_size),
        found[0],
        dict(zip(sets, found[1:], strict=True)),
        tuple(reports),
        date,
        None if stream else Mixture.of(config.data.train, reports[0], found[0].samples_per_row),
        train.images if any(dataset.has_images for dataset in found) else None,
        stream,
    )


def with_images(config: Config, checked: Checked, dataset: TokenizedDataset) -> Checked:
    """Return `checked` for a data set, whose rows may have images: `train.accumulate: auto` is then by micro-batch.

    Raises:
        InputError: The configuration cannot be done with images.
    """
    if not dataset.has_images:
        return checked
    row = f"{dataset.position(int(np.flatnonzero(dataset.images_of)[0]))} has images"
    if checked.layout.pp > 1:
        raise takes_text_alone(row)
    if config.train.accumulate == "by_layer":
        raise not_by_layer(f"{row}, and layers hand on text alone")
    for key, (off, why, mend) in _OFF_WITH_IMAGES.items():
        section, name = key.split(".")
        value = checked.layout.size(name) if section == "parallel" else getattr(getattr(config, section), name)
        if value != off:
            raise InputError(f"{key} {value}: {row}, {why}; {mend}", key="data.images-unsupported")
    return checked.in_order((Order(), "rows have images"))


def refuse_idle_tower(config: Config, training: TokenizedDataset) -> None:
    """Raise `InputError` if a tower is to be trained, and no row of the training data has an image."""
    if config.model.vision == "train" and not training.has_images:
        raise InputError(
            "model.vision is train, and no row of data.train has an image that would train the tower; remove it",
            key="config.combination",
        )


def stop_where_taught(model: PreTrainedModel, report: DataReport, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let `model` stop at every token that ends trained answers.

    Those that its generation config lacks are put before its own, as in TRL, and `report` gets a note. Samples stop
    there, and the saved generation config names them.
    """
    if not model.can_generate():
        return
    config = model.generation_config
    own: list[int] = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
    if not (taught := sorted(report.ends.keys() - set(own))):
        return
    before, both = config.eos_token_id, [*taught, *own]
    config.eos_token_id = both if len(both) > 1 else both[0]
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in taught)
    report.notes.append(
        f"answers end with {named}, where the base's generation would go on (its eos_token_id is {before}); the "
        f"generation_config that is saved has eos_token_id {config.eos_token_id}"
    )


def read_where_padded(checked: Checked, pad_token_id: int) -> None:
    """Let a classifier take the run's padding for padding, which its config may not name; the saved config names it."""
    if is_classifier(checked.model):
        for config in (checked.model.config, checked.model_config):  # the latter for a frozen copy, which is calibrated
            config.get_text_config().pad_token_id = pad_token_id


def _today() -> datetime.date:
    """Return today by rank 0's clock: midnight passes, and nodes have time zones. Every rank calls it."""
    return from_rank_0(datetime.date.today())


def _on_all_ranks(name: str, preparation: Preparation, say: Callable[[str], None]) -> PreparedData:
    """Return the tokens, made now if one rank does not find them; of jobs that need the same, one makes them."""
    found = _find(preparation)
    with ExitStack() as stack:
        while found is None and (holder := _held_by_another(stack, preparation)):
            say(f"waiting for {name}, which is tokenized by {holder}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            found = _find(preparation)
        found = found or _find(preparation) or _made(name, preparation, say)
    say(f"{name} is prepared: {found.directory}")
    return found


def _find(preparation: Preparation) -> PreparedData | None:
    """Return the tokens, if every rank finds them."""
    with raise_on_all_ranks("looking for prepared data"):
        found = preparation.find()
    return None if int(sum_over_ranks(torch.tensor([found is None])).item()) else found


def _held_by_another(stack: ExitStack, preparation: Preparation) -> str:
    """Return who makes the tokens; if nobody does, this job has the right to from now on. Every rank calls it."""
    holder = ""
    with raise_on_all_ranks("locking the prepared data"):
        if dist.get_rank() == 0:
            holder = held_by_another(stack, preparation)
    return from_rank_0(holder)


def held_by_another(stack: ExitStack, preparation: Preparation) -> str:
    """Return the job that makes these tokens now, or an empty text.

    Then this process has the right to make them, until `stack` is closed.
    """
    lock = RunLock(preparation.directory, name=f".making-{preparation.key}.json")
    try:
        stack.enter_context(lock)
    except InputError:
        if lock.held_by is None:
            raise
    return "" if lock.held_by is None else str(lock.held_by)


def _made(name: str, preparation: Preparation, say: Callable[[str], None]) -> PreparedData:
    boot_id = _BOOT_ID.read_text(encoding="utf-8") if _BOOT_ID.exists() else ""
    hosts = gather_objects(f"{socket.gethostname()} {boot_id}")
    here = [rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()]]
    share = RowShare(here.index(dist.get_rank()), len(here))
    building = preparation.building(f"{from_rank_0(uuid.uuid4().hex)}-{here[0]}")
    stale = ""
    with raise_on_all_ranks("looking for tokens of other rows"):
        if dist.get_rank() == 0 and preparation.is_stale():
            stale = ", as its rows have changed since it was prepared"
    say(f"tokenizing {name}{stale}")
    dated = replace(preparation.recipe, date=preparation.recipe.date or _today())
    making = replace(preparation, recipe=dated)
    shown = counted(f"tokenizing {name}, about", "rows") if dist.get_rank() == 0 else nullcontext(lambda rows: None)
    with raise_on_all_ranks("tokenizing the data"), shown as progress:
        # As if all ranks were as fast as this one.
        making.write_share(building, share, lambda rows: progress(rows * share.count))
    with raise_on_all_ranks("joining the tokens"):
        if share.index == 0:
            making.finish(building, share.count)
    found = _find(preparation)
    assert found is not None
    return found
