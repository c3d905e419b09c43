"""Prepare a verification: the run's model (all of its layers or the first few), its layout and a few steps of its data.

Every rank makes the same setup before any weights are loaded. It never communicates, so all ranks refuse a
configuration that cannot work with the same sentence. Random parts (dropout, jitter) would make two equal runs differ:
they are switched off, and the report has a note about it.

The steps are samples of the run, small enough for the allowed tokens. The sharded job gets its batches from the
training data loader, packed or padded as configured. The reference gets each sample by itself, so an error in packing,
padding or the distribution of rows to ranks becomes visible.
"""

import itertools
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.anatomy import Anatomy
from expertmesh.compat import ignore_when_loading
from expertmesh.config import Config, ObjectiveConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.data import (
    IGNORE,
    BatchLayout,
    Recipe,
    Sample,
    Step,
    TokenizedDataset,
    TrainingBatches,
    found_or_built,
    load_tokenizer,
    padding_token_id,
)
from expertmesh.data.images import Images
from expertmesh.data.tokenized import no_data
from expertmesh.distributed.layout import Layout, explicit
from expertmesh.introspection.attention import packing_refusal
from expertmesh.planning.forecast import forecast
from expertmesh.step.forward_backward import Order
from expertmesh.step.loss import Objective
from expertmesh.step.objectives import objective_of
from expertmesh.training.objective import Teacher
from expertmesh.training.startup.data import with_images
from expertmesh.training.startup.model_check import Checked, check_model, longest
from expertmesh.training.startup.preflight import refuse_config, refuse_disk
from expertmesh.verification.options import VerifyOptions
from expertmesh.weights.meta_model import build_meta_model, read_model_config

STEPS = 3
_RANDOM = re.compile(r"(dropout|jitter|_pdrop$)")
LEAST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """The model, the layout and the data of one verification."""

    config: Config
    """The run's configuration with an explicit layout and without dropout."""
    model_config: PreTrainedConfig
    """The model's config, without random parts and cut to the verified layers."""
    directory: Path
    """The directory of the model's files."""
    anatomy: Anatomy
    """The anatomy of the verified layers."""
    layout: Layout
    order: Order
    """The order of the micro-batches of a step."""
    steps: "tuple[StepData, ...]"
    """The optimizer steps to compute."""
    notes: tuple[str, ...]
    layers: tuple[int, int]
    """The number of verified layers, and of all layers of the model."""
    dropped: str | None
    """A pattern for the file tensors of layers that are left out; None if none are."""
    packs: bool
    """True if the model can keep packed samples apart."""
    weights_seed: int | None
    """The seed of random first weights; None if they are read from `directory`."""
    teacher: "Setup | None" = None
    """The same with the model, all of it, that the objective learns from; None without one."""

    def meta_model(self, dtype: torch.dtype, *, fuse: bool = True) -> PreTrainedModel:
        """Return the unsharded model on meta; it ignores file tensors of layers that are left out.

        Args:
            fuse: Fuse experts that are a list of MLPs.
        """
        model = build_meta_model(
            self.model_config,
            dtype,
            directory=self.directory,
            attention=None if self.config.model.attention == "auto" else self.config.model.attention,
            trust_remote_code=self.config.model.trust_remote_code,
            fuse=fuse,
            num_labels=1 if self.config.objective.facts.rewards else None,
        )
        self.forget_layers(model)
        return model

    def forget_layers(self, model: PreTrainedModel) -> None:
        """Let `model` load from files that contain more layers than it has."""
        if self.dropped is not None:
            ignore_when_loading(model, self.dropped)


def set_up(config: Config, options: VerifyOptions, world_size: int) -> Setup:
    """Read config.json, headers, tokenizer and data, and decide what to verify.

    Raises:
        InputError: If the configuration, the model or the data cannot work.

    Collectives: none.
    """
    config, notes = _without_chance(config)
    refuse_config(config, names_data=not options.random_data)
    model = config.model
    model_config, directory = read_model_config(
        model.name_or_path, model.revision, model.trust_remote_code, from_config=model.from_config
    )
    _silence(model_config, notes)
    if config.moe.dispatch == "deepep":
        notes.append("moe.dispatch deepep carries bfloat16 alone: it is auto in what is compared in other precisions")
    if options.random_data and (most := longest(model_config)) is not None:
        length = min(config.data.max_length, most)
        config = config.model_copy(update={"data": config.data.model_copy(update={"max_length": length})})
    # Check the full model even if layers are left out: `train` would refuse the same, and choose the same layout.
    checked = check_model(config, model_config, directory, world_size)
    layout, every = checked.layout, len(checked.anatomy.blocks)
    config = config.model_copy(update={"parallel": explicit(layout)})
    kept = every if options.layers is None else min(options.layers, every)
    dropped = None
    if kept < every:
        dropped = _pattern_of_dropped(checked.anatomy, kept)
        config, model_config = _first_layers(config, model_config, kept, every)
        try:
            checked = check_model(config, model_config, directory, world_size)
        except InputError as error:
            raise InputError(f"--layers {kept}: {error}; keep more layers", key=error.key) from error
    if len(checked.anatomy.blocks) != kept:
        raise InputError(
            f"--layers {kept}: {model_config.model_type} cannot be cut to its first layers; leave it out",
            key="verify.layers-unsupported",
        )
    if not options.random_data:
        refuse_disk(config, checked.model)
    if warning := forecast(config, checked).warning:
        notes.append(warning)
    if options.random_data:
        notes.append("token ids are random: no data was named")
    steps, checked = _steps(config, options, checked)
    setup = Setup(
        config,
        model_config,
        directory,
        checked.anatomy,
        layout,
        checked.order,
        tuple(steps),
        tuple(notes),
        (kept, every),
        dropped,
        packing_refusal(checked.model) is None,
        config.weights_seed,
    )
    return replace(setup, teacher=_of_teacher(setup, checked.objective.teacher))


def _steps(config: Config, options: VerifyOptions, checked: Checked) -> "tuple[list[StepData], Checked]":
    """Return the steps, and `checked` as their images need it; its config, of a reward model, gets the padding and the
    label of a run.
    """
    facts: dict[str, Any] = {"tokens": options.tokens, "steps": STEPS, "pad_token_id": 0}
    if options.random_data:
        dataset = random_dataset(checked.vocab_size, config.data.max_length, 64, config.train.seed)
    else:
        tokenizer = load_tokenizer(config.model, config.data.chat_template)
        recipe = Recipe.of(config, config.data.train, tokenizer, (checked.model_config, checked.directory))
        dataset, _ = found_or_built(config, recipe)
        checked = with_images(config, checked, dataset)
        facts |= {"images": recipe.images if dataset.has_images else None}
        facts |= {"pad_token_id": padding_token_id(tokenizer, checked.vocab_size)}
    if config.objective.facts.rewards:
        checked.model_config.num_labels = 1
        checked.model_config.get_text_config().pad_token_id = facts["pad_token_id"]
    return steps_of(dataset, config, checked.layout, **facts), checked


def _of_teacher(setup: Setup, teacher: Teacher | None) -> Setup | None:
    if teacher is None:
        return None
    anatomy, config = teacher.plan.anatomy, setup.config
    every = len(anatomy.blocks)
    return replace(
        setup,
        config=config.model_copy(update={"train": config.train.model_copy(update={"compile": False})}),
        model_config=teacher.model_config,
        directory=teacher.directory,
        anatomy=anatomy,
        layers=(every, every),
        dropped=None,
        weights_seed=None,
    )


def in_float32(precision: PrecisionConfig) -> PrecisionConfig:
    """Return the precision with fp32 everywhere but in `frozen`, for comparisons with a tolerance; fp64 stays fp64."""
    if precision.params == "float64":
        return precision
    return PrecisionConfig(params="float32", compute="float32", reduce="float32", frozen=precision.frozen)


def _without_chance(config: Config) -> tuple[Config, list[str]]:
    """Return `config` without dropout of adapters, and notes about it and about random weights."""
    if config.model.from_config:
        return config, [f"the weights are random, drawn from train.seed {config.train.seed}"]
    if config.lora is None or config.lora.dropout == 0.0:
        return config, []
    lora = config.lora.model_copy(update={"dropout": 0.0})
    return config.model_copy(update={"lora": lora}), [f"lora.dropout {config.lora.dropout:g} is off"]


def _silence(config: PreTrainedConfig, notes: list[str]) -> None:
    """Set dropout and jitter to 0 in the config and its nested configs, and add a note for each."""
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _silence(value, notes)
        elif isinstance(value, float) and value and _RANDOM.search(key):
            setattr(config, key, 0.0)
            notes.append(f"the model's {key} {value:g} is off")


def _pattern_of_dropped(anatomy: Anatomy, kept: int) -> str:
    """Return a pattern for the file tensors of the blocks from `kept` on.

    Raises:
        InputError: If the model has its blocks in several lists.
    """
    lists = {name.rpartition(".")[0] for name in anatomy.blocks}
    if len(lists) > 1:
        raise InputError(
            f"--layers: this model has blocks in {', '.join(sorted(lists))}; leave --layers out",
            key="verify.layers-unsupported",
        )
    numbers = "|".join(name.rpartition(".")[2] for name in anatomy.blocks[kept:])
    return rf"(^|\.){re.escape(lists.pop().rpartition('.')[2])}\.({numbers})\."


def _first_layers(
    config: Config, model_config: PreTrainedConfig, kept: int, every: int
) -> tuple[Config, PreTrainedConfig]:
    """Return both configurations for the model's first `kept` blocks.

    Each list of the model's config with one entry per layer is cut. Ours names no layer, which may be left out: any
    checkpointing and any placement will do.
    """
    cut = deepcopy(model_config)
    text: Any = cut.get_text_config()  # of any family
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == every:
            vars(text)[key] = type(value)(value[:kept])
    vars(text)["num_hidden_layers"] = kept
    moe, train = config.moe, config.train.model_copy(update={"checkpoint_layers": "all"})
    if moe.placement != "contiguous":
        moe = moe.model_copy(update={"placement": "balanced"})
    return config.model_copy(update={"train": train, "moe": moe}), cut


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample and its place in the batches of the sharded job."""

    index: int
    """The number of the sample in its data set."""
    input_ids: Tensor
    labels: Tensor
    micro: int
    row: int
    """The number of its row in the micro-batch."""
    start: int
    """The position of its first token in the row."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class StepData:
    """The samples of one optimizer step."""

    dataset: TokenizedDataset
    form: BatchLayout
    """The shape of the step's rows and micro-batches; its data rank has no meaning."""
    minimised: ObjectiveConfig
    """The objective; with one of pairs, so are the samples."""

    @property
    def mismatched(self) -> "StepData | None":
        """The mismatched rows of the step (`Step.mismatched`), for kto."""
        if self.dataset.desirable is None:
            return None
        every = np.arange(len(self.dataset))
        return replace(self, dataset=self.form.mismatched(self.dataset, [every], self.dataset.mismatched_reference))

    @property
    def targets(self) -> int:
        """The number of targets: all labels but the first of each sample. Counted independently of the data loader."""
        return sum(int((self.dataset.sample(i).labels[1:] != IGNORE).sum()) for i in range(len(self.dataset)))

    @property
    def rows(self) -> Sequence[np.ndarray]:
        """The numbers of the samples in each row, for all data ranks."""
        return self.form.plan(self.dataset, np.arange(len(self.dataset) // self.dataset.samples_per_row)).rows

    def objective(self, step: Step) -> Objective:
        """Return the objective that the job minimises in `step`, made of these samples."""
        return objective_of(self.minimised, rows=step.rows, target_tokens=step.target_tokens)

    def batches(self, layout: Layout, rank: int, **changes: Any) -> Step:
        """Return the step of the data rank of `rank`, from the training data loader."""
        form = replace(self.form, data_rank=layout.data_rank(rank), data_ranks=layout.data_ranks, **changes)
        per_pass = form.micro_batch_size * form.data_ranks
        rows = len(self.dataset) // self.dataset.samples_per_row  # an upper bound, packed or not
        size = -(-rows // per_pass) * per_pass
        return next(TrainingBatches(self.dataset, form, global_batch_size=size, shuffle=False, seed=0).epoch(0))

    def placed(self, layout: Layout, rank: int) -> list[PlacedSample]:
        """Return the samples of the data rank of `rank`, in the order of its micro-batches."""
        found = []
        for number, samples in enumerate(self.rows[layout.data_rank(rank) :: layout.data_ranks]):
            micro, row = divmod(number, self.form.micro_batch_size)
            start = 0
            for place, index in enumerate(samples.tolist()):
                sample = self.dataset.sample(index)
                ids, labels = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.labels)
                of_batch = row if self.form.packing else row * len(samples) + place
                found.append(PlacedSample(index, ids, labels, micro, of_batch, start))
                start += len(ids) if self.form.packing else 0
        return found

    def repeated(self, multiple: int) -> "StepData":
        """Return the step with samples repeated to a multiple of `multiple` rows, one sample (or pair) a row."""
        each = multiple * self.dataset.samples_per_row
        indices = np.arange(-(-len(self.dataset) // each) * each) % len(self.dataset)
        samples = [self.dataset.sample(index) for index in indices.tolist()]
        kept = [(sample.input_ids, sample.labels != IGNORE) for sample in samples]
        return replace(self, dataset=_like(self.dataset, indices, kept), form=replace(self.form, packing=False))

    def uneven(self) -> "StepData":
        """Return the step with uneven numbers of targets: sample i keeps the first (1 + i mod 4) / 4 of its targets."""
        samples = [self.dataset.sample(index) for index in range(len(self.dataset))]
        kept = []
        for number, sample in enumerate(samples):
            places = (sample.labels != IGNORE).nonzero()[0]
            wanted = np.zeros(len(sample.labels), dtype=np.bool_)
            wanted[places[: max(1, len(places) * (1 + number % 4) // 4)]] = True
            kept.append((sample.input_ids, wanted))
        return replace(self, dataset=_like(self.dataset, np.arange(len(kept)), kept))


def steps_of(
    dataset: TokenizedDataset,
    config: Config,
    layout: Layout,
    *,
    tokens: int,
    steps: int,
    pad_token_id: int,
    images: Images | None = None,
) -> list[StepData]:
    """Return `steps` steps of about `tokens` tokens each, from the first samples of the run, in its order.

    A step has as many rows as a step of the run, but at most two micro-batches per rank (times pp, so that a pipeline
    uses the run's schedule and has micro-batches between filling and draining). Samples are cut to fit `tokens`, but
    not below `LEAST_LENGTH`; a long sample keeps the part that ends with its last target, one with images everything.
    The samples of a small data set repeat. With an objective of pairs a row is a pair.

    Args:
        tokens: Tokens of one step over all ranks.
        pad_token_id: For padding of rows.
        images: What makes pixels of the images of the samples.

    Raises:
        InputError: If the data set is empty.
    """
    train, packing, each = config.train, config.data.packing, dataset.samples_per_row
    per_pass = train.micro_batch_size * layout.data_ranks
    rows = per_pass * min(2 * layout.pp, train.global_batch_size // per_pass)
    length = min(config.data.max_length, max(LEAST_LENGTH, tokens // (rows * each)))
    longest = max(LEAST_LENGTH // 2, length // 2) if packing else length
    order = np.arange(len(dataset) // each)
    if config.data.shuffle:
        order = np.random.default_rng([train.seed, 0]).permutation(len(order))
    if not len(dataset):
        raise no_data("the training data has no sample to verify on", "correct data.train")
    samples = itertools.cycle(index for row in order.tolist() for index in range(row * each, (row + 1) * each))
    form, made = BatchLayout(train.micro_batch_size, 0, 1, packing, pad_token_id, length, images), []
    for _ in range(steps):
        chosen: list[tuple[np.ndarray, np.ndarray]] = []
        pictures: list[bytes] = []
        labels: list[bool] = []
        while len(chosen) < (16 * rows if packing else rows * each):
            index = next(samples)
            pictures.append(dataset.pictures(index))
            sample = dataset.sample(index)
            cut = _cut(sample, len(sample.labels) if pictures[-1] else longest)
            labels += [bool(dataset.desirable[index])] if dataset.desirable is not None else []
            if packing and sum(len(ids) for ids, _ in chosen) + len(cut[0]) > rows * length:
                break
            chosen.append(cut)
        step = StepData(_dataset(chosen, each, labels, pictures), form, config.objective)
        while packing and len(step.rows) > rows:  # free positions at the ends of rows can add up to one more row
            chosen.pop()
            step = replace(step, dataset=_dataset(chosen))
        made.append(step)
    return made


def random_dataset(vocab_size: int, length: int, samples: int, seed: int) -> TokenizedDataset:
    """Return samples of random token ids and different lengths; all tokens but each first quarter are targets."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(vocab_size, size=max(4, length - 3 * n % (length // 2))) for n in range(samples)]
    targets = [np.arange(len(each)) >= len(each) // 4 for each in ids]
    return TokenizedDataset.of_samples([each.astype(np.int32) for each in ids], targets)


def _cut(sample: Sample, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and target mask of at most `longest` tokens that end with the last target, if the sample is longer."""
    targets = sample.labels != IGNORE
    stop = len(targets) if len(targets) <= longest else int(targets.nonzero()[0][-1]) + 1
    part = slice(max(0, stop - longest), max(stop, min(longest, len(targets))))
    ids, kept = sample.input_ids[part], targets[part].copy()
    kept[0] = False
    return ids, kept


def _dataset(
    samples: Sequence[tuple[np.ndarray, np.ndarray]],
    samples_per_row: int = 1,
    desirable: Sequence[bool] = (),
    pictures: Sequence[bytes] = (),
) -> TokenizedDataset:
    ids, targets = [ids.astype(np.int32) for ids, _ in samples], [targets for _, targets in samples]
    facts = {"desirable": desirable, "judged": len(desirable) > 0, "pictures": pictures[: len(samples)]}
    return TokenizedDataset.of_samples(ids, targets, samples_per_row=samples_per_row, **facts)


def _like(
    dataset: TokenizedDataset, indices: np.ndarray, samples: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TokenizedDataset:
    """Return a data set of `samples`, made of the samples `indices` of `dataset`, with their labels and references."""
    labels = () if dataset.desirable is None else dataset.desirable[indices].tolist()
    made = _dataset(samples, dataset.samples_per_row, labels, [dataset.pictures(index) for index in indices.tolist()])
    made.reference = None if dataset.reference is None else dataset.reference[indices]
    if dataset.mismatched_reference is not None:
        made.mismatched_reference = dataset.mismatched_reference[indices]
    return made
