"""Frozen experts that stay packed: adapters train as stock PEFT's do on the model whose base is what the codes say.

Real gloo ranks, different rows on every data rank, as in test_parity.py. The reference's base weights are dequantised
once, by the whole tensor; ours are quantised from the plain model and never are wide again.
"""

import copy
import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import expertmesh as em
from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.distributed.mesh import Mesh
from expertmesh.export.merge import merge
from expertmesh.state import codes as codes_module
from expertmesh.state.codes import Sections, quantised_format
from expertmesh.state.packed import HostCopies, PackedTensor
from expertmesh.state.shards import local_tensor
from tests.adapters import test_dropout
from tests.adapters.reference import TARGETS, AdapterDistance, PeftRun, random_adapter, tiny_peft_run, train_adapters
from tests.adapters.stock import logits
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import worst

TOLERANCE = 1e-5
BITS = {"nf4": 4 + 32 / 64, "mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16, "float8": 8 + 32 / 128**2}
# Bytes of one expert are rounded up to 16, which small experts notice, and their last blocks are partial.
SIZES = {"hidden_size": 512, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 128}


def _precision(frozen: str, compute: str = "float32") -> em.PrecisionConfig:
    return em.PrecisionConfig(params=compute, compute=compute, reduce=compute, frozen=frozen)  # type: ignore[arg-type]


def _expert_weights(model: nn.Module) -> dict[str, bool]:
    """Names of the experts' matrices, and whether they are transposed."""
    return {f"{spec.name}.{name}": spec.transposed for spec in describe(model).experts for name in (spec.up, spec.down)}


@torch.no_grad()
def _dequantise_base(frozen: str, model: nn.Module) -> None:
    for name, transposed in _expert_weights(model).items():
        weight = model.get_parameter(name)
        rows, columns = weight.shape[:0:-1] if transposed else weight.shape[1:]
        kind = quantised_format(frozen, rows, columns, transposed=transposed)
        weight.copy_(PackedTensor.of(weight.detach(), kind, weight.dtype).values())
    for name in _linear_weights(model):
        weight = model.get_parameter(name)
        kind = quantised_format(frozen, *weight.shape, by_rows=True)
        weight.copy_(PackedTensor.of(weight.detach(), kind, weight.dtype).values())


def _linear_weights(model: nn.Module) -> list[str]:
    """All in the layers but routers, by name: what is expected does not depend on what finds them."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name and name.rpartition(".")[2] not in ("gate", "router")
    ]


@functools.cache
def _expected(family: str, frozen: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PeftRun:
    """Stock PEFT on the dequantised base; `initial` is the plain model."""
    prepare = functools.partial(_dequantise_base, frozen)
    directory = Path(tempfile.mkdtemp(prefix="frozen-"))
    run = tiny_peft_run(family, directory, prepare=prepare, dtype=dtype, **changes)
    plain = tiny_peft_run(family, Path(tempfile.mkdtemp(prefix="plain-")), dtype=dtype, **changes)
    return dataclasses.replace(run, initial=plain.initial)


def _train(
    run: PeftRun, frozen: str, world: int, layouts: list[dict[str, int]], **options: Any
) -> list[AdapterDistance]:
    """By layout, as rank 0 sees it."""
    compute = str(next(run.initial.parameters()).dtype).removeprefix("torch.")

    def all_layouts() -> list[AdapterDistance]:
        return [
            train_adapters(run, em.ParallelConfig(**layout), precision=_precision(frozen, compute), **options)
            for layout in layouts
        ]

    results: list[list[AdapterDistance]] = shared_ranks(all_layouts, world)
    return results[0]


@pytest.mark.slow_cases(r"(gpt_oss|deepseek_v3|mixtral)-.*", why="ep, fsdp, tp, cp and pp stay, with two formats")
@pytest.mark.slow_cases(r"qwen3_moe-mxfp4-4-.*", why="two ranks stay")
@pytest.mark.parametrize(
    ("family", "frozen", "world", "layouts"),
    [
        ("qwen3_moe", "mxfp4", 2, [{"ep": 2}, {"ep": 1}]),
        ("gpt_oss", "nvfp4", 4, [{"ep": 2}, {"ep": 4}, {"ep": 2, "replicate": 2}]),
        ("deepseek_v3", "float8", 4, [{"ep": 2}, {"ep": 1}]),
        ("qwen3_moe", "mxfp4", 4, [{"ep": 2, "tp": 2}, {"ep": 2, "cp": 2}, {"ep": 2, "pp": 2}]),
        ("mixtral", "nf4", 1, [{"ep": 1}]),
    ],
)
def test_every_adapter_gradient_equals_stock_peft_on_the_dequantised_base(
    family: str, frozen: str, world: int, layouts: list[dict[str, int]]
) -> None:
    for distance in _train(_expected(family, frozen), frozen, world, layouts):
        distance.check(TOLERANCE)


@pytest.mark.slow_cases(r"(checkpointed|loop)", why="selective stays")
@pytest.mark.parametrize(
    "options",
    [
        {"moe": em.MoeConfig(compute="loop")},
        {"activation_checkpointing": True},
        {"activation_checkpointing": "selective"},
    ],
    ids=["loop", "checkpointed", "selective"],
)
def test_the_other_ways_to_compute_give_the_same(options: dict[str, Any]) -> None:
    _train(_expected("qwen3_moe", "mxfp4"), "mxfp4", 2, [{"ep": 1}], **options)[0].check(TOLERANCE)


@pytest.mark.slow(why="float32 stays")
@pytest.mark.parametrize(("frozen", "layout"), [("nvfp4", {"ep": 2, "tp": 2}), ("nf4", {"ep": 2})])
def test_in_double_precision_nothing_is_left_but_the_last_digits(frozen: str, layout: dict[str, int]) -> None:
    run = _expected("qwen3_moe", frozen, torch.float64)
    _train(run, frozen, 4 if "tp" in layout else 2, [layout])[0].check(1e-10)


@pytest.mark.slow(why="without checkpointing stays; test_dropout.py compares layouts")
def test_dropout_drops_the_same_in_every_layout(tmp_path: Path) -> None:
    model = tiny_model(test_dropout.FAMILY, **test_dropout.BLOCKS)
    random_adapter(model, tmp_path, *TARGETS[test_dropout.FAMILY])
    trained = functools.partial(test_dropout.with_dropout, tmp_path, precision=_precision("nf4"))
    (alone,) = shared_ranks(trained, 1, 1)
    for options in ({"ep": 2, "micro_batch": 2}, {"ep": 1, "activation_checkpointing": True}):
        assert worst(shared_ranks(functools.partial(trained, **options), 2)[0], alone)[0] <= TOLERANCE
    plain_base = functools.partial(test_dropout.with_dropout, tmp_path, 2)
    assert worst(shared_ranks(plain_base, 2)[0], alone)[0] > 1e-3


def _held(model: nn.Module, mesh: Mesh) -> dict[bool, tuple[int, int, set[str]]]:
    """Bytes and elements of this rank's frozen experts, and the classes that hold them; the same of linear layers."""
    found = {}
    for are_experts, names in ((True, _expert_weights(model)), (False, _linear_weights(model))):
        local: list[Any] = [model.get_parameter(name).to_local() for name in names]  # type: ignore[operator]
        kinds = {type(each).__name__ for each in local}
        found[are_experts] = (sum(each.nbytes for each in local), sum(each.numel() for each in local), kinds)
    return found


@pytest.mark.slow(why="that gradients are right stays")
@pytest.mark.parametrize("frozen", BITS)
def test_after_training_each_rank_holds_its_codes_and_scales_alone(frozen: str) -> None:
    run = _expected("qwen3_moe", "nf4", **SIZES)
    for distance in _train(run, frozen, 2, [{"ep": 2}, {"ep": 1}], after=_held):
        for are_experts, (held, elements, kinds) in distance.after.items():
            # Each row of a linear layer has the scales of its blocks.
            bits = 8 + 32 / 128 if frozen == "float8" and not are_experts else BITS[frozen]
            assert kinds == {"PackedTensor"}
            assert held <= 1.02 * elements * bits / 8


def _swap_nibbles(model: nn.Module, mesh: Mesh) -> None:
    for name in _expert_weights(model):
        local: Any = model.get_parameter(name).to_local()  # type: ignore[operator]
        _, start, end = local.kind.sections
        codes = local.packed_LB[:, start:end]
        codes.copy_(codes >> 4 | codes << 4)


def _next_expert(model: nn.Module, mesh: Mesh) -> None:
    for name in _expert_weights(model):
        codes = model.get_parameter(name).to_local().packed_LB  # type: ignore[operator]
        codes.copy_(codes.roll(1, 0))


def _transposed_in_backward(model: nn.Module, mesh: Mesh) -> None:
    """The second half of the experts is dequantised as the first in backward."""
    dequantise = codes_module.dequantise

    def wrong(sections: Sections, *args: Any, **options: Any) -> torch.Tensor:
        codes = sections.codes_XRB
        codes = codes if torch.is_grad_enabled() else codes.flip(0)
        return dequantise(dataclasses.replace(sections, codes_XRB=codes), *args, **options)

    mock.patch("expertmesh.state.packed.dequantise", wrong).start()


def _next_row(model: nn.Module, mesh: Mesh) -> None:
    for name in _linear_weights(model):
        codes = model.get_parameter(name).to_local().packed_LB  # type: ignore[operator]
        codes.copy_(codes.roll(1, 0))


def _next_row_in_backward(model: nn.Module, mesh: Mesh) -> None:
    values = PackedTensor.values
    mock.patch.object(PackedTensor, "values", lambda self: values(self).roll(_is_backward(), 0)).start()


def _is_backward() -> int:
    return int(torch._C._current_graph_task_id() != -1)


@pytest.mark.parametrize(
    "bug", [_swap_nibbles, _next_expert, _transposed_in_backward, _next_row, _next_row_in_backward]
)
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[nn.Module, Mesh], None]) -> None:
    distance = _train(_expected("qwen3_moe", "nf4"), "nf4", 2, [{"ep": 2}], tamper=bug)[0]
    with pytest.raises(AssertionError):
        distance.check(TOLERANCE)
    assert max(distance.loss, distance.gradient[0]) > 1e-3


OFFLOADED = [
    {"ep": 2},
    {"ep": 1},
    {"ep": 2, "replicate": 2},
    {"ep": 2, "tp": 2},
    {"ep": 2, "pp": 2},
]


def _streamed(events: list[tuple[int, int, int]], model: nn.Module, mesh: Mesh) -> None:
    """Note in `events` each copy from host memory: which layer's, which layer was used last, and how many layers'
    experts are there with it, copied or gathered.
    """
    own = {name: local_tensor(p) for name, p in model.named_parameters() if "experts" in name}
    layers = {id(t.host): int(name.split(".")[2]) for name, t in own.items() if isinstance(t, PackedTensor)}
    gathered: dict[int, list[torch.UntypedStorage]] = {}
    copied: set[int] = set()
    last = [-1]
    start, take, gather = HostCopies._start, HostCopies.take, PackedTensor.fsdp_post_all_gather

    def started(self: HostCopies, device: Any) -> None:
        layer = layers[id(self)]
        here = {layer for layer, storages in gathered.items() if any(each.size() for each in storages)}
        copied.add(layer)
        events.append((layer, last[0], len(here | copied)))
        start(self, device)

    def taken(self: HostCopies, *args: Any) -> Any:
        last[0] = layers[id(self)]
        return take(self, *args)

    def used(self: PackedTensor, outputs: Any, *args: Any, **options: Any) -> Any:
        if self.host is not None:
            gathered.setdefault(layers[id(self.host)], []).append(outputs[0].untyped_storage())
            copied.discard(layers[id(self.host)])
        return gather(self, outputs, *args, **options)

    mock.patch.object(HostCopies, "_start", started).start()
    mock.patch.object(HostCopies, "take", taken).start()
    mock.patch.object(PackedTensor, "fsdp_post_all_gather", used).start()


def _offloaded(
    run: PeftRun, layout: dict[str, int], **options: Any
) -> tuple[AdapterDistance, list[tuple[int, int, int]]]:
    events: list[tuple[int, int, int]] = []
    parallel = em.ParallelConfig(offload="experts", **layout)  # type: ignore[arg-type]
    tamper = functools.partial(_streamed, events)
    return train_adapters(run, parallel, precision=_precision("mxfp4"), tamper=tamper, **options), events


@pytest.mark.slow_cases(r"checkpointed", why="without checkpointing stays; test_dropout.py compares layouts")
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}], ids=["plain", "checkpointed"])
def test_experts_from_host_memory_come_a_layer_ahead_in_both_directions(options: dict[str, Any]) -> None:
    run = _expected("qwen3_moe", "mxfp4", num_hidden_layers=4)
    distance, events = shared_ranks(functools.partial(_offloaded, **options), 2, run, {"ep": 2})[0]
    distance.check(TOLERANCE)
    assert max(layers for *_, layers in events) == 2
    # Of the second step: two matrices of each layer, both ways, while the one before is used; the ends are not ahead.
    forward = [(0, 0)] * 2 + [(layer, layer - 1) for layer in range(1, 4) for _ in range(2)]
    backward = [(3, 3)] * 2 + [(layer, layer + 1) for layer in (2, 1, 0) for _ in range(2)]
    assert sorted(event[:2] for event in events[16:24]) == sorted(forward)
    assert sorted(event[:2] for event in events[24:32]) == sorted(backward)
    assert len(events) % 16 == 0


@pytest.mark.slow_cases(r"4-.*", why="one rank stays, and ep 2 in the order of copies")
@pytest.mark.parametrize(("world", "layout"), [(4, layout) for layout in OFFLOADED[2:]] + [(1, {"ep": 1})], ids=str)
def test_experts_from_host_memory_train_the_same_in_every_layout(world: int, layout: dict[str, int]) -> None:
    distance, events = shared_ranks(_offloaded, world, _expected("qwen3_moe", "mxfp4"), layout)[0]
    distance.check(TOLERANCE)
    assert max(layers for *_, layers in events) <= 2


def test_experts_of_another_layer_from_host_memory_turn_the_comparison_red() -> None:
    (distance,) = _train(
        _expected("qwen3_moe", "mxfp4"), "mxfp4", 2, [{"ep": 2, "offload": "experts"}], tamper=_first_layers
    )
    with pytest.raises(AssertionError):
        distance.check(TOLERANCE)


def _first_layers(model: nn.Module, mesh: Mesh) -> None:
    """Each copy is of the first layer's experts."""
    names = list(_expert_weights(model))
    local = {name: local_tensor(model.get_parameter(name)) for name in names}
    first = {tensor.kind: tensor.packed_LB for tensor in reversed(local.values())}
    copy = PackedTensor.fsdp_pre_all_gather

    def wrong(self: PackedTensor, mesh: Any) -> Any:
        (packed_LB,), rest = copy(self, mesh)
        return (packed_LB.copy_(first[self.kind]) if self.host is not None else packed_LB,), rest

    mock.patch.object(PackedTensor, "fsdp_pre_all_gather", wrong).start()


def _refusal(frozen: str, lora: em.LoraConfig | None, tp: int = 1, **changes: Any) -> str:
    model: Any = tiny_model("qwen3_moe", **changes)
    with pytest.raises(InputError) as caught:
        em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, tp=tp)), lora=lora, precision=_precision(frozen))
    return f"{caught.value.key}: {caught.value}"


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    lora = em.LoraConfig(r=2)
    assert (
        "precision.frozen-unsupported: precision.frozen: nf4: model.layers.0"
        in shared_ranks(_refusal, 1, "nf4", None)[0]
    )
    assert "a model in memory has no files" in shared_ranks(_refusal, 1, "as_published", lora)[0]
    odd = shared_ranks(functools.partial(_refusal, num_experts=6), 4, "nf4", lora)
    assert "efsdp cuts model.layers.0.mlp.experts.gate_up_proj inside its experts" in odd[0]
    rows = shared_ranks(
        functools.partial(_refusal, num_attention_heads=2, num_key_value_heads=1, head_dim=2), 4, "nf4", lora
    )
    assert "4 ranks cannot share the 2 rows of model.layers.0.self_attn.k_proj.weight evenly" in rows[0]
    inside = functools.partial(_refusal, tp=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    problem = shared_ranks(inside, 2, "nf4", lora)[0]
    assert "tp 2 cuts model.layers.0.self_attn.o_proj.weight inside its blocks of 64 columns" in problem


def _train_nothing(directory: Path, frozen: str, target: Path) -> dict[str, torch.Tensor]:
    """Save the adapter; the weights that an inference engine would get."""
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    lora = em.LoraConfig(from_adapter=str(directory / "adapter"))
    model = em.load_model(directory / "base", mesh, precision=_precision(frozen), lora=lora)
    em.save_adapter(model, target / "adapter")
    return {name: tensor.clone() for name, tensor in em.iter_hf_weights(model)}


@pytest.mark.slow_cases(r"gpt_oss-nf4", why="scales of two kinds stay")
@pytest.mark.parametrize(("family", "frozen"), [("qwen3_moe", "nvfp4"), ("gpt_oss", "nf4")])
def test_merging_adds_to_what_was_trained_on(family: str, frozen: str, tmp_path: Path) -> None:
    """Base and adapter apart in PEFT, together by the command, and streamed to an engine: the same values."""
    run = _expected(family, frozen)
    plain: Any = run.initial
    plain.save_pretrained(tmp_path / "base")
    shutil.copytree(run.start, tmp_path / "adapter")
    streamed = shared_ranks(_train_nothing, 2, tmp_path, frozen, tmp_path / "out")[0]
    report = merge(tmp_path / "out/adapter", tmp_path / "merged", base=str(tmp_path / "base"))
    assert (report.base_checked, report.frozen) == (True, frozen)
    written = load_file(tmp_path / "merged/model.safetensors")
    assert written.keys() == streamed.keys()
    for name, tensor in streamed.items():
        assert torch.allclose(tensor, written[name], rtol=1e-5, atol=1e-6), name
    base: Any = copy.deepcopy(run.initial)
    _dequantise_base(frozen, base)
    expected = logits(peft.PeftModel.from_pretrained(base, str(run.start)))
    merged = type(plain).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert float((logits(merged) - expected).norm() / expected.norm()) <= TOLERANCE
    note = tmp_path / "out/adapter" / BASE_FILE
    note.write_text(json.dumps({**json.loads(note.read_text()), "frozen": "mxfp4"}))
    with refused("adapter.other-base", IntegrityError):
        merge(tmp_path / "out/adapter", tmp_path / "refused", base=str(tmp_path / "base"))
