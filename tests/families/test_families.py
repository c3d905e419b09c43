"""The family matrix in small: a fixed core and a rotating rest of it, and docs/models.md against both.

`make families` proves all. Here the number of commits chooses the rest, and the parallel axis that the core is measured
on, so that it is the same for everybody at one commit and everything comes around.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from tests.families.axes import AXES, run_of
from tests.families.catalogue import Family, families
from tests.families.lora import measure as measure_adapters
from tests.families.outcomes import outcome_of
from tests.families.proof import TOLERANCE, Layout, Run, Subject, measure, prove
from tests.families.table import PATH, read, read_axes, read_lora, read_refused_in_bf16
from tests.families.tiny import EXPERTS, random_model
from tests.families.variants import Variant, prove_variant, published
from tests.support.ranks import RankFailed, shared_ranks
from tests.support.rotation import commit_count, of_this_commit

CORE = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "olmoe")
ROTATING = 2
LAYOUTS: tuple[Layout, ...] = ((2, 2, "grouped_mm"), (4, 2, "loop"))
FAMILIES = {family.name: family for family in families()}


def _chosen() -> list[Family]:
    """Some of the core, which other tests have as well, and some of the rest."""
    rest = [name for name in FAMILIES if name not in CORE]
    return [FAMILIES[name] for names in (CORE, rest) for name in of_this_commit(names, ROTATING)]


def _axes_of(family: Family) -> tuple[str, ...]:
    """Of the core, which tests/parallel has on every axis, one of them at a commit; of the others all."""
    axes = tuple(AXES)
    return axes if family.name not in CORE else (axes[(commit_count() + CORE.index(family.name)) % len(axes)],)


@pytest.mark.slow(why="`make families` proves all; the planted bug on every axis stays")
@pytest.mark.parametrize("family", _chosen(), ids=lambda family: family.name)
def test_a_family_is_what_the_table_says(family: Family) -> None:
    text = PATH.read_text()
    outcome = outcome_of(family, LAYOUTS, LAYOUTS[1:], _axes_of(family))
    assert outcome.kind == read(text)[family.name]
    if outcome.kind == "proven":
        assert (not isinstance(outcome.lora, str)) is read_lora(text)[family.name]
        said = read_axes(text)[family.name]
        assert {axis: not isinstance(proof, str) for axis, proof in outcome.axes.items()} == {
            axis: said[axis] for axis in _axes_of(family)
        }
        assert outcome.refused_in_bf16 is (family.name in read_refused_in_bf16(text))


@pytest.mark.slow(why="parallel/test_by_layer.py has the core; others at the next commit")
@pytest.mark.parametrize(
    "family",
    [each for each in _chosen() if read(PATH.read_text())[each.name] == "proven"],
    ids=lambda family: family.name,
)
def test_a_family_trains_by_layer_or_is_refused_as_on_pp(family: Family, tmp_path: Path) -> None:
    assert family.model_class is not None
    subject = Subject(family.model_class, family.name, tmp_path)
    trains = read_axes(PATH.read_text())[family.name]["pp"]
    refused = pytest.raises(RankFailed, match=r"train\.accumulate: by_layer: .* cannot")
    with nullcontext() if trains else refused:
        prove(subject, {"by layer": [Run(LAYOUTS[0], by_layer=True)]})


VARIANTS = list(published())


@pytest.mark.slow(why="`make test-all` has one, another at the next commit")
@pytest.mark.parametrize("variant", of_this_commit(VARIANTS, 1), ids=lambda v: v.name)
def test_a_published_configuration_trains_as_its_family_does(variant: Variant) -> None:
    """At tiny sizes, on every axis and packed."""
    variant.register()
    said = prove_variant(variant)
    assert "refused" not in said, said
    assert said.endswith("packing exact")


@pytest.mark.slow(why="one family")
def test_llama4_as_it_is_published_with_its_vision_tower() -> None:
    """The table has its text model; published checkpoints hold that inside a larger one, head included."""
    family = Family("llama4_published", "Llama4ForConditionalGeneration", automatic=False, interface=False)
    assert outcome_of(family, LAYOUTS[:1], axes=()).kind == "proven"


# As they are published: around a vision tower.
PUBLISHED = {
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "llama4_published": "Llama4ForConditionalGeneration",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
}


@pytest.mark.slow(why="five published classes; adapters/test_save.py has the tiny families")
@pytest.mark.parametrize("family", PUBLISHED)
def test_stock_peft_reads_the_adapter_of_a_published_class(family: str, tmp_path: Path) -> None:
    errors = measure_adapters(PUBLISHED[family], family, tmp_path, LAYOUTS[:1], torch.float64)
    assert max(errors.gradient, errors.loss, errors.weight) <= TOLERANCE, errors


def _step_on_text(source: Path, target: Path) -> None:
    precision = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
    model: Any = em.load_model(source, em.init_mesh(em.ParallelConfig(ep=2), num_experts=EXPERTS), precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    ids = torch.arange(3, 20)[None]
    em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=2 * 16).backward()
    optimizer.step()
    em.save_model(model, target, dtype=None)


def test_a_vision_tower_is_as_it_was_after_training_on_text(tmp_path: Path) -> None:
    random_model(PUBLISHED["qwen3_5_moe"], "qwen3_5_moe").save_pretrained(tmp_path / "source")
    shared_ranks(_step_on_text, 2, tmp_path / "source", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    tower = {name for name in before if "visual" in name}
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert tower
    assert tower <= unchanged
    assert len(unchanged - tower) < 3, unchanged - tower


def test_transformers_itself_cannot_read_the_published_files_of_longcat_flash(tmp_path: Path) -> None:
    """Its identity experts have no weights there, but places in the class. Read again, the family can be proven."""
    model: Any = random_model("LongcatFlashForCausalLM", "longcat_flash")
    model.save_pretrained(tmp_path)
    routed = model.config.n_routed_experts
    tensors = load_file(tmp_path / "model.safetensors")
    number = {name: re.search(r"\.experts\.(\d+)\.", name) for name in tensors}
    published = {n: t for n, t in tensors.items() if (found := number[n]) is None or int(found[1]) < routed}
    assert len(published) < len(tensors)
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path)


def test_the_table_has_every_family_of_the_transformers_it_names() -> None:
    text = PATH.read_text()
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the table was generated with another version of transformers")
    assert list(read(text)) == list(FAMILIES)
    assert "failed" not in read(text).values()


def test_what_the_table_says_is_read_as_it_is_written() -> None:
    text = PATH.read_text()
    proven = {axis: sum(said[axis] for said in read_axes(text).values()) for axis in AXES}
    for axis, count in proven.items():
        assert re.search(rf"^- \*\*{axis}\*\*, .*: {count} proven", text, re.MULTILINE)
    assert sum(kind == "proven" for kind in read(text).values()) == int(re.search(r"(\d+) families proven", text)[1])
    refused = read_refused_in_bf16(text)
    assert refused == set()  # every family computes in bfloat16


def _swap_two_experts(model: nn.Module) -> None:
    down = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert isinstance(down, DTensor)
    with torch.no_grad():
        down.to_local()[[0, 1]] = down.to_local()[[1, 0]]


def _drop_the_routers_gradient(model: nn.Module) -> None:
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.register_forward_pre_hook(lambda module, args: (args[0], args[1], args[2].detach()))


def _lose_expert_gradients_of_other_ranks(model: nn.Module) -> None:
    model.get_parameter("model.layers.0.mlp.experts.down_proj").register_hook(lambda gradient: gradient / 2)


@pytest.mark.parametrize("bug", [_swap_two_experts, _drop_the_routers_gradient, _lose_expert_gradients_of_other_ranks])
def test_the_proof_sees_a_planted_bug(bug: Callable[[nn.Module], None], tmp_path: Path) -> None:
    assert _gradient_error({"ep": Run(LAYOUTS[0])}, bug, tmp_path)["ep"] > 100 * TOLERANCE


def _halve_a_gradient(model: nn.Module) -> None:
    """Of the experts in the last block: with pipeline stages, only one of them has it."""
    for name, parameter in model.named_parameters():
        if name == "model.layers.1.mlp.experts.down_proj":
            parameter.register_hook(lambda gradient: gradient / 2)


def test_the_proof_of_every_axis_sees_a_planted_bug(tmp_path: Path) -> None:
    errors = _gradient_error({axis: run_of(axis) for axis in AXES}, _halve_a_gradient, tmp_path)
    assert all(error > 100 * TOLERANCE for error in errors.values()), errors


def _permute_weights_of_pairs(model: nn.Module) -> None:
    router = model.get_submodule("model.layers.0.mlp.router")
    router.register_forward_hook(lambda module, args, out: (*out[:2], out[2].roll(1), *out[3:]))


def _add_the_bias_on_every_rank(model: nn.Module) -> None:
    mixture: Any = model.get_submodule("model.layers.0.mlp")
    mixture.register_forward_hook(lambda module, args, out: out + module.bias)


def _halve_gradients_of_attentions_mixture(model: nn.Module) -> None:
    queries = model.get_submodule("model.layers.1.self_attention.experts.input_linear")
    queries.register_forward_hook(lambda module, args, out: (out + out.detach()) / 2)


@pytest.mark.parametrize(
    "bug", [_permute_weights_of_pairs, _add_the_bias_on_every_rank, _halve_gradients_of_attentions_mixture]
)
def test_the_proof_of_mixtures_that_sort_sees_a_planted_bug(bug: Callable[[nn.Module], None], tmp_path: Path) -> None:
    subject = Subject("JetMoeForCausalLM", "jetmoe", tmp_path)
    errors = measure(subject, {"ep": [Run(LAYOUTS[0])]}, torch.float32, tamper=bug)["ep"]
    assert errors.gradient > 100 * TOLERANCE


def _gradient_error(runs: dict[str, Run], bug: Callable[[nn.Module], None], scratch: Path) -> dict[str, float]:
    subject = Subject("Qwen3MoeForCausalLM", "qwen3_moe", scratch)
    found = measure(subject, {name: [run] for name, run in runs.items()}, torch.float32, tamper=bug)
    return {name: errors.gradient for name, errors in found.items()}
