"""Optimizers that store less: the same result on every layout, bit for bit, and what stochastic rounding promises."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.compat import TorchDispatchMode, tree_leaves
from expertmesh.config import LoraConfig, OptimConfig
from expertmesh.state.shards import local_tensor
from expertmesh.training.optimizers import build, muon
from expertmesh.training.optimizers.adamw import AdamW8bit, Blocks, Codebook, Noise
from expertmesh.training.optimizers.build import build_optimizer, moment_bytes
from expertmesh.training.optimizers.muon import matrices_of
from expertmesh.training.run import train
from expertmesh.verification.checkpoint import verify
from tests.checkpoint.damage import change_manifest
from tests.checkpoint.forge import forge_tensors
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.training.given_gradients import Case, State, given_gradient, sharded_steps, whole_steps
from tests.training.tiny_run import rows_without_times, run_config, train_steps, weights, write_inputs

OPTIM: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.1}
ROUNDED = OptimConfig(stochastic_rounding=True, **OPTIM)
EIGHT_BIT = OptimConfig(name="adamw_8bit", **OPTIM)
MUON = OptimConfig(name="muon", **OPTIM)
# Matrices of more than 4,096 elements whose rows are no multiple of a block, and that tp, ep and efsdp cut within one.
WIDE: dict[str, Any] = {"hidden_size": 320, "moe_intermediate_size": 272, "num_hidden_layers": 1}
CPU = torch.device("cpu")
# Parts of different sizes and an empty one (97 rows of the vocabulary and a norm of 5 elements on 4 ranks); experts
# that efsdp cuts on a later dim (3 on 2 ranks).
UNEVEN: dict[str, Any] = {"vocab_size": 97, "kv_lora_rank": 5}
ODD_EXPERTS: dict[str, Any] = {"num_experts": 6}


def _equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


LAYOUTS = [
    (1, {"ep": 1}, "deepseek_v3", UNEVEN),
    (2, {"ep": 2}, "deepseek_v3", UNEVEN),
    (4, {"ep": 2}, "deepseek_v3", UNEVEN),
    (4, {"ep": 2, "replicate": 2}, "qwen3_moe", {}),
    (4, {"ep": 2}, "qwen3_moe", ODD_EXPERTS),
    (4, {"ep": 2, "tp": 2}, "qwen3_moe", {}),
    (4, {"ep": 2, "pp": 2}, "qwen3_moe", {"tie_word_embeddings": True}),
]


@pytest.mark.slow_cases(r"(1-axes0|2-axes1|4-axes[2346])-.*", why="four ranks with tp stay")
@pytest.mark.parametrize(("world", "axes", "family", "changes"), LAYOUTS)
def test_stochastic_rounding_is_the_same_on_every_layout(
    world: int, axes: dict[str, int], family: str, changes: dict[str, Any]
) -> None:
    case = Case(ROUNDED, family=family, changes=changes)
    expected = whole_steps(case, 3)
    for state in shared_ranks(sharded_steps, world, case, em.ParallelConfig(**axes), range(3)):
        _equal(state, expected)


@pytest.mark.slow_cases(r"(2-axes0|4-axes[124])-.*", why="tp stays, which cuts rows")
@pytest.mark.parametrize(
    ("world", "axes", "changes", "params"),
    [
        (2, {"ep": 2}, {}, "float32"),
        (4, {"ep": 2}, {}, "bfloat16"),
        (4, {"ep": 2}, ODD_EXPERTS, "float32"),
        (4, {"ep": 2, "tp": 2}, {}, "bfloat16"),
        (4, {"ep": 2, "replicate": 2}, {}, "float32"),
    ],
)
def test_moments_of_8_bits_are_the_same_on_every_layout(
    world: int, axes: dict[str, int], changes: dict[str, Any], params: str
) -> None:
    optim = EIGHT_BIT.model_copy(update={"stochastic_rounding": params == "bfloat16"})
    case = Case(optim, params, changes={**WIDE, **changes})
    expected = whole_steps(case, 3)
    for state in shared_ranks(sharded_steps, world, case, em.ParallelConfig(**axes), range(3)):
        _equal(state, expected)


def _by_torch(case: Case, steps: int) -> State:
    """torch's Muon on each matrix by itself, and torch's AdamW on all else."""
    model = case.model()
    count = matrices_of(model, describe(model))
    split = {
        name: [
            torch.nn.Parameter(part) for part in parameter.detach().clone().view(count[name], -1, parameter.shape[-1])
        ]
        for name, parameter in model.named_parameters()
        if name in count
    }
    others = {name: parameter for name, parameter in model.named_parameters() if name not in count}
    rate, decay = case.optim.learning_rate, case.optim.weight_decay
    matrices = [part for parts in split.values() for part in parts]
    optimizers = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others.values(), lr=rate, weight_decay=decay, betas=case.optim.betas, eps=case.optim.eps),
    ]
    for step in range(steps):
        for name, parameter in model.named_parameters():
            grad = given_gradient(name, step, parameter)
            if name in count:
                for part, of_part in zip(split[name], grad.view(count[name], -1, grad.shape[-1]), strict=True):
                    part.grad = of_part
            else:
                parameter.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    joined = {name: torch.stack([part.detach() for part in parts]) for name, parts in split.items()}
    return {n: joined[n].view(p.shape) if n in joined else p.detach() for n, p in model.named_parameters()}


def _far(state: State, expected: State) -> float:
    """The largest error of any tensor, relative to it."""
    errors = {name: float((state[name] - wanted).norm() / wanted.norm()) for name, wanted in expected.items()}
    return max(errors.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_muon_is_torch_s_muon_on_each_matrix_by_itself(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # in which torch's multiplies
    case = Case(MUON, "float64", family)
    expected = _by_torch(case, 3)
    assert _far(whole_steps(case, 3, compute=torch.float64), expected) <= 1e-10
    assert _far(whole_steps(case, 3, compute=torch.bfloat16), expected) <= 1e-3
    monkeypatch.setattr(build, "matrices_of", lambda *given: dict.fromkeys(matrices_of(*given), 1))
    assert _far(whole_steps(case, 3, compute=torch.float64), expected) > 1e-3  # stacks as one matrix


@pytest.mark.slow_cases(r"4-axes1-.*", why="tp with pp stays, and uneven parts")
@pytest.mark.slow_cases(r"(2-axes0|4-axes[23456])-.*", why="tp with pp stays, and uneven parts")
@pytest.mark.parametrize(
    ("world", "axes", "family", "changes"),
    [*LAYOUTS, (4, {"ep": 1}, "qwen3_moe", ODD_EXPERTS), (4, {"ep": 2, "tp": 2, "pp": 2}, "qwen3_moe", {})][1:],
)
def test_muon_is_that_of_whole_matrices_on_every_layout(
    world: int, axes: dict[str, int], family: str, changes: dict[str, Any]
) -> None:
    case = Case(MUON, "float64", family, changes)
    expected = whole_steps(case, 3, compute=torch.float64)
    for state in shared_ranks(
        sharded_steps, max(world, 4 * axes.get("pp", 1)), case, em.ParallelConfig(**axes), range(3)
    ):
        assert state.keys() == expected.keys()
        assert _far(state, expected) <= 1e-10


def _parts_by_themselves() -> None:
    """As if each rank's part of a matrix were a matrix."""
    muon.Matrices.are_local = True  # type: ignore[assignment]
    muon.Matrices.shape = property(lambda own: own.parameter.to_local().shape[-2:])  # type: ignore[assignment]


def test_parts_orthogonalised_by_themselves_would_be_noticed() -> None:
    case = Case(MUON, "float64")
    axes = em.ParallelConfig(ep=2)
    state = shared_ranks(sharded_steps, 2, case, axes, range(3), None, None, _parts_by_themselves)[0]
    assert _far(state, whole_steps(case, 3, compute=torch.float64)) > 1e-4


def _blocks_of_own_columns() -> None:
    """As if ranks that share a block did not tell each other how large it is."""
    Blocks.write.__globals__["_groups_of_last_dim"] = lambda tensor: []


def test_blocks_that_ranks_do_not_share_would_be_noticed() -> None:
    case = Case(EIGHT_BIT, "float32", changes=WIDE)
    axes = em.ParallelConfig(ep=2, tp=2)
    state = shared_ranks(sharded_steps, 2, case, axes, range(3), None, None, _blocks_of_own_columns)[0]
    with pytest.raises(AssertionError):
        _equal(state, whole_steps(case, 3))


def _round_by_own_places() -> None:
    """As if a rank's first element were the tensor's."""
    own = Noise.__init__

    def init(noise: Noise, key: str, boxes: Any, shape: Any, device: Any) -> None:
        (box,) = boxes
        own(noise, key, [tuple((0, stop - start) for start, stop in box)], shape, device)

    Noise.__init__ = init  # type: ignore[method-assign]


def test_rounding_by_a_rank_s_own_places_would_be_noticed() -> None:
    case = Case(ROUNDED)
    state = shared_ranks(sharded_steps, 2, case, em.ParallelConfig(ep=2), range(3), None, None, _round_by_own_places)[0]
    with pytest.raises(AssertionError):
        _equal(state, whole_steps(case, 3))


@pytest.mark.slow_cases(r"optim0-bfloat16", why="Muon stays, and rounding of full weights")
@pytest.mark.parametrize(("optim", "params"), [(ROUNDED, "bfloat16"), (MUON, "float64")])
def test_adapters_are_updated_alike_on_every_layout(optim: OptimConfig, params: str) -> None:
    case = Case(optim, params, lora=LoraConfig(r=3, targets=("attention", "experts")))
    expected = shared_ranks(sharded_steps, 1, case, em.ParallelConfig(ep=1), range(3))[0]
    state = shared_ranks(sharded_steps, 4, case, em.ParallelConfig(ep=2), range(3))[0]
    assert _far(state, expected) <= (1e-10 if optim is MUON else 0)


@pytest.mark.slow_cases(r"case[01]", why="Muon stays; every layout has the same steps of the others")
@pytest.mark.parametrize("case", [Case(ROUNDED), Case(EIGHT_BIT, "float32", changes=WIDE), Case(MUON, "float64")])
def test_steps_go_on_alike_at_another_layout(tmp_path: Path, case: Case) -> None:
    expected = whole_steps(case, 4, compute=torch.float64)
    shared_ranks(sharded_steps, 4, case, em.ParallelConfig(ep=2, tp=2), range(2), tmp_path)
    assert verify(tmp_path / "step-00000002").findings == ()
    for world, axes in ((4, {"ep": 2, "tp": 2}), (4, {"ep": 2}), (2, {"ep": 2, "pp": 1}), (1, {"ep": 1})):
        state = shared_ranks(sharded_steps, world, case, em.ParallelConfig(**axes), range(2, 4), None, tmp_path)[0]
        if case.optim is MUON:  # products of matrices may round otherwise
            assert _far(state, expected) <= 1e-10
        else:
            _equal(state, expected)


def _load_into_another_optimizer(case: Case, path: Path) -> None:
    with refused("checkpoint.other-optimizer", naming="AdamW8bit"):
        sharded_steps(case, em.ParallelConfig(ep=1), [], None, path)


def _updates_of_torch_and_ours() -> tuple[list[bool], list[int]]:
    mesh, steps = em.init_mesh(em.ParallelConfig(ep=2)), []
    models = [tiny_model("qwen3_moe") for _ in range(2)]
    for model in models:
        em.parallelize(model, mesh)
    ours = build_optimizer(models[0], OptimConfig(**OPTIM), seed=0)
    settings = {**OptimConfig(**OPTIM).model_dump(include={"betas", "eps", "weight_decay"}), "lr": 1e-3}
    torchs = torch.optim.AdamW(models[1].parameters(), **settings, fused=True)
    for model, optimizer in zip(models, (ours, torchs), strict=True):
        for _ in range(2):
            for name, parameter in model.named_parameters():
                parameter.grad = parameter.detach() * (2 if name.endswith("norm.weight") else -1)
            with CountDTensorOps() as counted:
                optimizer.step()
        steps.append(counted.ops)
    same = [torch.equal(*map(local_tensor, pair)) for pair in zip(*(m.parameters() for m in models), strict=True)]
    for mine, its in zip(*(optimizer.state.values() for optimizer in (ours, torchs)), strict=True):
        same += [torch.equal(local_tensor(mine[slot]), local_tensor(its[slot])) for slot in its]
    return same, steps


class CountDTensorOps(TorchDispatchMode):
    """Ops on DTensors, each of which costs the host a look-up of how it is sharded."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += any(isinstance(leaf, DTensor) for leaf in tree_leaves(args))
        return func(*args, **(kwargs or {}))


def test_adamw_is_torch_s_own_without_an_op_on_dtensors() -> None:
    for same, (ours, torchs) in shared_ranks(_updates_of_torch_and_ours, 2):
        assert len(same) > 60
        assert all(same)
        assert (ours, torchs) == (0, 1)


def test_moments_of_8_bits_are_no_moments_of_another_optimizer(tmp_path: Path) -> None:
    case = Case(EIGHT_BIT, "float32", changes=WIDE)
    shared_ranks(sharded_steps, 1, case, em.ParallelConfig(ep=1), range(1), tmp_path)
    shared_ranks(_load_into_another_optimizer, 1, Case(OptimConfig(), "float32", changes=WIDE), tmp_path)


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("forget", "said"),
    [
        (["exp_avg_scale"], f"{EMBEDDING}: is trained, but its optimizer state exp_avg_scale is not in the checkpoint"),
        (["exp_avg"], f"optimizer.{EMBEDDING}.exp_avg_scale: is the scale of what is not in 8 bits"),
    ],
)
def test_codes_without_scales_and_scales_without_codes_are_found(tmp_path: Path, forget: list[str], said: str) -> None:
    case = Case(EIGHT_BIT, "float32", changes=WIDE)
    shared_ranks(sharded_steps, 1, case, em.ParallelConfig(ep=1), range(1), tmp_path)
    path = tmp_path / "step-00000001"
    keys = [f"optimizer.{EMBEDDING}.{slot}" for slot in forget]

    def unnamed(manifest: dict[str, Any]) -> None:
        for key in keys:
            del manifest["optimizer"][key]

    def without(tensors: State) -> None:
        for key in keys:
            del tensors[key]

    forge_tensors("optimizer-00000-of-00001.safetensors", without)(path)
    change_manifest(unnamed)(path)
    assert said in [finding.text for finding in verify(path).findings]


@pytest.mark.slow(why="test_resume.py has it for AdamW")
def test_a_stopped_run_with_stochastic_rounding_continues_bit_for_bit(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    options = ["parallel.ep=2", "precision={params: bfloat16, compute: bfloat16}", "optim.stochastic_rounding=true"]
    whole = run_config(inputs, tmp_path / "whole", *options)
    shared_ranks(train, 2, whole)
    broken = run_config(inputs, tmp_path / "broken", *options)
    shared_ranks(train_steps, 2, broken, 2)
    shared_ranks(train, 2, broken)
    _equal(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    assert rows_without_times(tmp_path / "broken") == rows_without_times(tmp_path / "whole")


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_what_is_stored_is_what_is_planned(name: Any, params: str) -> None:
    case = Case(OptimConfig(name=name), params, changes=WIDE)
    model = case.model()
    matrices = matrices_of(model, describe(model))
    width = getattr(torch, params).itemsize
    stored = [tensor for key, tensor in whole_steps(case, 1).items() if key.startswith("optimizer.")]
    counted = sum(tensor.nbytes for tensor in stored if tensor.dim())
    parameters = model.named_parameters()
    assert counted == sum(moment_bytes(name, p.shape, width, is_matrix=n in matrices) for n, p in parameters)


def test_six_bytes_a_parameter_and_torch_s_names() -> None:
    case = Case(ROUNDED)
    state = whole_steps(case, 1)
    ours = {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
    theirs = whole_steps(Case(OptimConfig(**OPTIM)), 1)
    assert ours == {name: (tensor.dtype, tensor.shape) for name, tensor in theirs.items()}
    parameters = sum(parameter.numel() for parameter in case.model().parameters())
    assert sum(tensor.nbytes for tensor in state.values() if tensor.dim()) == 6 * parameters


def test_rounding_keeps_the_expectation_and_every_value_that_needs_none() -> None:
    box, shape = ((0, 512), (0, 512)), (512, 512)
    torch.manual_seed(0)
    value = torch.randn(shape) * torch.logspace(-12, 12, 512)
    errors = torch.zeros(shape, dtype=torch.float64)
    for step in range(64):
        rounded = Noise(f"{step}", [box], shape, CPU).round(value, slice(None))
        assert bool(((rounded.float() - value).abs() < value.abs() * 2**-7).all())
        errors += (rounded.double() - value.double()) / value.double().abs()
    # An error has at most the spread of one step: 2**-7 / 2, over 64 rounds of 512 x 512 elements.
    assert abs(float(errors.mean() / 64)) < 4 * 2**-8 / (64 * 512 * 512) ** 0.5
    assert float((errors / 64).square().mean().sqrt()) < 2**-8 / 64**0.5
    exact = torch.tensor([[0.0, -0.0, 1.5, -3.0]])
    noise = Noise("", [((0, 1), (0, 4))], (1, 4), CPU)
    assert torch.equal(noise.round(exact, slice(None)).float(), exact)
    bits = torch.tensor([[0x7FFFFFFF, 0x7FC00000, 0x7F800000, -0x800000]], dtype=torch.int32)  # the first is CUDA's NaN
    assert bool(noise.round(bits.view(torch.float32), slice(None)).isfinite().logical_not().all())


def test_elements_steps_and_names_are_rounded_independently() -> None:
    value = torch.full((256, 256), 1 + 2**-8)  # half way between two neighbours
    box = ((0, 256), (0, 256))

    def up(key: str) -> torch.Tensor:
        return (Noise(key, [box], (256, 256), CPU).round(value, slice(None)).double() - 1) * 2**8 - 1  # -1 or 1

    def alike(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one * other).mean().abs() * one.numel() ** 0.5)  # 1 is chance

    first = up("7/1/a")
    assert alike(first, torch.ones_like(first)) < 4
    for other in ("7/2/a", "7/1/b", "8/1/a"):
        assert alike(first, up(other)) < 4
    assert alike(first[1:], first[:-1]) < 4
    assert alike(first[:, 1:], first[:, :-1]) < 4
    assert alike(first[1:, 1:] * first[:-1, :-1], first[1:, :-1] * first[:-1, 1:]) < 4


def _updates_in_8_bits(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the last update, in units of the learning rate."""
    weight, before = torch.nn.Parameter(torch.zeros(64, 256)), torch.zeros(64, 256)
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = AdamW8bit([("w", weight)], lr=1.0, stochastic_rounding=False, seed=0, **settings)
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = gradient
        optimizer.step()
    return weight.detach() - before


@pytest.mark.parametrize("without", [0, 2], ids=["with tokens", "at last without tokens"])
def test_small_gradients_beside_a_large_one_move_a_weight_by_no_more_than_the_learning_rate(without: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def gradients() -> Iterator[torch.Tensor]:
        for _ in range(60):
            gradient = 1e-5 * torch.randn(64, 256, generator=generator)
            gradient[:, 0] = 3e-2
            yield gradient
        yield from [torch.zeros(64, 256)] * without

    assert _updates_in_8_bits(gradients())[:, 1:].abs().max() < 1.5


def test_steps_are_as_long_in_both_directions() -> None:
    gradient = torch.full((64, 256), 1e-2)
    gradient[:, 0] = 1.0
    up, down = (_updates_in_8_bits([sign * gradient] * 100)[:, 0] for sign in (-1, 1))
    assert torch.allclose(up, torch.ones(64), atol=1e-3)
    assert torch.equal(up, -down)


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_that_of_the_nearest_value(signed: bool) -> None:
    codebook = Codebook.on(CPU, signed)
    torch.manual_seed(0)
    value = torch.cat([torch.randn(1 << 18) * torch.logspace(-9, 0, 1 << 18), codebook.values, codebook.borders[:-1]])
    value = value.clamp(-1, 1) if signed else value.abs().clamp_max(1)
    codes = codebook.nearest(value)
    assert torch.equal(codes.long(), torch.bucketize(value, codebook.borders[:-1]))
    inside = value[:-255] * (1 - 2**-20)  # not a border, whose own rounding decides
    codes = codebook.nearest(inside)
    distance = (codebook.values[codes.long()] - inside).abs()
    for other in (-1, 1):
        neighbour = codebook.values[(codes.long() + other).clamp(0, 255)]
        assert bool((distance <= (neighbour - inside).abs()).all())
    assert torch.equal(codebook.nearest(codebook.values), torch.arange(256, dtype=torch.uint8))


def _mean_weight(optim: OptimConfig, params: str, steps: int) -> float:
    parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=getattr(torch, params)))
    model = torch.nn.ParameterDict({"weight": parameter})
    optimizer = build_optimizer(model, optim, seed=1)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return float(parameter.detach().double().mean())


def test_small_updates_add_up_as_in_float32_and_are_lost_to_nearest() -> None:
    optim, steps = {"learning_rate": 1e-4}, 200
    master = _mean_weight(OptimConfig(**optim), "float32", steps)  # type: ignore[arg-type]
    rounded = _mean_weight(OptimConfig(stochastic_rounding=True, **optim), "bfloat16", steps)  # type: ignore[arg-type]
    nearest = _mean_weight(OptimConfig(**optim), "bfloat16", steps)  # type: ignore[arg-type]
    assert 1 - master == pytest.approx(0.02, rel=1e-3)
    assert rounded - 1 == pytest.approx(master - 1, rel=0.02)
    assert nearest == 1
