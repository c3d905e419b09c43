"""Draw the first values of a model that has a config and no files, as transformers initialises its class.

`FirstValues` stands where the files of a directory would: a plan to load is made of its tensors, and shards are filled
from it. The values of a tensor come from the class's own `_init_weights`, run on that tensor alone, under a generator
seeded by seed and name; those of routed experts expert by expert, each under a seed of its own. So they depend on no
layout and no rank, and a rank draws its own experts only. Of other tensors every rank that holds a part draws all
values: beside the shards it holds one tensor, or one expert of one, in float32.
"""

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions, meta_device_safe_creation_ops

from expertmesh.anatomy import experts_specs
from expertmesh.compat import buffer_slots, init_weights, mark_initialised, parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import gather_objects
from expertmesh.io.boxes import Box, slices
from expertmesh.io.safetensors_reader import WeightFiles, open_weight_files
from expertmesh.state.model_view import ModelView
from expertmesh.state.patching import exchanged
from expertmesh.state.shards import cut_local, is_on_other_stage, local_tensor
from expertmesh.weights.lazy import lazy_tensors
from expertmesh.weights.quantised.published import PublishedTensors, quantisation

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt")
_PROBE_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class DrawnTensor:
    """A parameter or persistent buffer as a leaf whose values are drawn."""

    name: str
    """The tensor's name in the state dict."""
    shape: tuple[int, ...]
    """Its global shape."""
    dtype: torch.dtype
    """float32 for every floating-point tensor."""
    experts: int | None
    """The number of experts that share dim 0 equally; None for other tensors."""


class FirstValues:
    """The tensors of a model by the names of its class, with the interface of `WeightFiles` and of `LibraryFiles`."""

    bytes_read = 0
    reads = 0
    """Tensors, or experts, that were drawn."""

    def __init__(self, view: ModelView, directory: Path, seed: int) -> None:
        self.directory, self.seed = directory, seed
        with torch.device("meta"), meta_device_safe_creation_ops():
            self._model: PreTrainedModel = view.family(deepcopy(view.module.config))
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            mark_initialised(tensor)
        counts = {
            f"{spec.name}.{each}": spec.num_experts for spec in experts_specs(self._model) for each in spec.parameters
        }
        self.tensors = {
            name: DrawnTensor(
                name,
                tuple(tensor.shape),
                torch.float32 if tensor.is_floating_point() else tensor.dtype,
                counts.get(name),
            )
            for name, tensor in ModelView(self._model).unique.items()
        }
        self._last: tuple[tuple[str, int | None], Tensor] | None = None

    @property
    def published(self) -> PublishedTensors:
        """The tensors as those of files."""
        return PublishedTensors(
            lazy_tensors(self.tensors),
            {name: (name,) for name in self.tensors},
        )

    def __enter__(self) -> "FirstValues":
        return self

    def __exit__(self, *_: object) -> None:
        self._last = None

    def read(self, tensor: DrawnTensor, box: Box, out: Tensor) -> None:
        """Fill `out` with the elements of `box`, in row-major order.

        Args:
            out: Contiguous, on the CPU, of the tensor's dtype.

        Raises:
            InputError: The model's class gives the tensor no first values.
        """
        if out.numel() == 0:
            return
        if tensor.experts is None:
            out.copy_(self._values(tensor, None)[slices(box)])
            return
        share, (start, stop) = tensor.shape[0] // tensor.experts, box[0]
        for expert in range(start // share, -(-stop // share)):
            rows = (max(start, expert * share), min(stop, (expert + 1) * share))
            inside = (rows[0] - expert * share, rows[1] - expert * share)
            values = self._values(tensor, expert)[slices((inside, *box[1:]))]
            out[rows[0] - start : rows[1] - start].copy_(values)

    __call__ = read

    def _values(self, tensor: DrawnTensor, expert: int | None) -> Tensor:
        """Return the tensor, or the rows of one expert; the last one stays, because boxes are read in parts."""
        wanted = (tensor.name, expert)
        if self._last is None or self._last[0] != wanted:
            self._last = None  # free it before the next one is drawn
            self._last = (wanted, self._draw(tensor, expert))
        return self._last[1]

    @torch.no_grad()
    def _draw(self, tensor: DrawnTensor, expert: int | None) -> Tensor:
        """Let the class initialise the tensor, or one expert of it, with all other tensors on meta."""
        self.reads += 1
        shape = tensor.shape if tensor.experts is None else (tensor.shape[0] // tensor.experts, *tensor.shape[1:])
        unset = torch.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).min
        values = torch.full(shape, unset, dtype=tensor.dtype)
        owner, _, leaf = tensor.name.rpartition(".")
        module = self._model.get_submodule(owner)
        is_parameter = leaf in parameter_slots(module)
        slots = parameter_slots(module) if is_parameter else buffer_slots(module)
        new = nn.Parameter(values, requires_grad=False) if is_parameter else values
        name = tensor.name if expert is None else f"{tensor.name}.{expert}"
        # The modules around the tensor, each with the (sub-)model whose `_init_weights` transformers calls for it.
        # transformers goes from children to parents.
        chain: list[tuple[PreTrainedModel, nn.Module]] = [(self._model, self._model)]
        for part in owner.split(".") if owner else ():
            inner = chain[-1][1].get_submodule(part)
            chain.append((inner if isinstance(inner, PreTrainedModel) else chain[-1][0], inner))
        constructor = getattr(module, "reset_parameters", None)  # of torch's modules; what the class draws replaces it
        # The caller's random state must not change; seeding the default generator alone leaves accelerators' as it is.
        with exchanged(slots, {leaf: new}), guard_torch_init_functions(), torch.random.fork_rng(devices=[]):
            for first in (None, constructor) if callable(constructor) else (None,):
                torch.default_generator.manual_seed(seed_of(self.seed, name))
                try:
                    if first is not None:
                        first()
                    for model, each in reversed(chain):
                        init_weights(model, each)
                except Exception as error:  # the family's own code
                    raise self._without_values(tensor, f": {error}") from error
                left = values.isnan() if tensor.dtype.is_floating_point else values == unset
                if not bool(left.any()):
                    return values
        raise self._without_values(tensor)

    def _without_values(self, tensor: DrawnTensor, reason: str = "") -> InputError:
        return InputError(
            f"model.from_config: {type(self._model).__name__} gives {tensor.name} no first values by itself{reason}; "
            "remove the key and name a model with weights",
            key="model.no-first-values",
        )


def open_weights(view: ModelView, directory: str | Path, seed: int | None = None) -> WeightFiles | FirstValues:
    """Return what a model is filled from: the files of `directory`, or the first values that `seed` gives.

    Args:
        seed: None for the files.

    Raises:
        InputError, SecurityError, IntegrityError: As `open_weight_files` does.
    """
    if seed is None:
        return open_weight_files(directory, view.weights_file)
    return FirstValues(view, Path(directory), seed)


@torch.no_grad()
def start_head(model: PreTrainedModel, names: Sequence[str], seed: int) -> None:
    """Give the allocated tensors `names` of a classifier's head their `first_head`. No communication."""
    here = ModelView(model).tensors
    for name, values in first_head(model, names, seed).items():
        if not is_on_other_stage(here[name]):
            local_tensor(here[name]).copy_(cut_local(here[name], values))


def first_head(model: PreTrainedModel, names: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Return the first values of a classifier's head, full and in float32, as drawn after `torch.manual_seed(seed)`."""
    view = ModelView(model)
    values: dict[str, Tensor] = {}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in names):
        head = view.full.get_submodule(module)
        assert isinstance(head, nn.Linear), f"{module} is no linear layer"
        # The caller's random state must not change, nor influence the values: all ranks draw equal ones. Making the
        # layer draws too; `torch.manual_seed` would also seed accelerators, which `fork_rng` does not restore here.
        with torch.random.fork_rng(devices=[]):
            new = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
            torch.default_generator.manual_seed(seed)
            init_weights(model, new)
        values |= {f"{module}.{leaf}": parameter.detach() for leaf, parameter in new.named_parameters()}
    return values


def refuse_from_config(config: PreTrainedConfig, directory: Path) -> None:
    """Raise `InputError` if the model in `directory` has weights, or is quantised, so that it starts from no config."""
    if quantisation(config) is not None:
        raise InputError(
            f"{directory}: model.from_config is true, but config.json has a quantization_config, and random weights "
            "have no codes; remove it from config.json",
            key="model.quantised-without-weights",
        )
    names = sorted(path.name for pattern in _WEIGHTS for path in directory.glob(pattern))
    if names:
        raise InputError(
            f"{directory}: model.from_config is true, but there are weights ({names[0]}); remove the key to train from "
            "them, or name a directory with config.json and the tokenizer alone",
            key="model.has-weights",
        )


def refuse_other_draws(seed: int) -> None:
    """Raise `InputError` on all ranks unless all of them draw the same values: by their seeds, and by their processors.

    Vector instructions of other processors round normal values differently.

    Collectives: every rank calls it; two all-gathers on the default group.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, ""))
        probe = torch.empty(_PROBE_ELEMENTS).normal_()
    found = gather_objects(hashlib.sha256(probe.numpy().data).hexdigest())
    if other := [rank for rank, each in enumerate(found) if each != found[0]]:
        raise InputError(
            f"model.from_config: rank {other[0]} draws other values than rank 0, from another seed or by a processor "
            "of another kind; give all ranks one seed, and machines of one kind",
            key="model.first-values-differ",
        )


def seed_of(seed: int, name: str) -> int:
    """Return the seed of one tensor's generator, from the seed of all and the tensor's name."""
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") >> 1
