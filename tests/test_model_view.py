"""A view shows the full model by name, whatever of it this rank holds."""

import torch
from torch.distributed.fsdp import fully_shard

import expertmesh as em
from expertmesh.state.model_view import ModelView
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

TIED = ["model.embed_tokens.weight", "lm_head.weight"]


def test_tied_tensors_have_all_their_names_and_count_once() -> None:
    view = ModelView(tiny_model("qwen3_moe", tie_word_embeddings=True))
    assert view.full is view.module
    assert not view.is_stage
    assert [names for names in view.ties if len(names) > 1] == [TIED]
    assert set(view.tensors) - set(view.unique) == {TIED[1]}
    assert view.tensors[TIED[0]] is view.tensors[TIED[1]]
    assert list(view.parameters) == [name for name, _ in view.module.named_parameters()]


def test_adapters_stand_apart() -> None:
    def names() -> tuple[set[str], set[str]]:
        model = tiny_model("qwen3_moe")
        before = set(ModelView(model).tensors)
        model = em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), lora=em.LoraConfig(r=4))
        view = ModelView(model)
        assert set(view.tensors) == before
        assert view.attached.mesh is not None
        return set(view.adapters), set(view.state) - before

    ((adapters, others),) = shared_ranks(names, 1)
    assert adapters == others
    assert all(name.endswith(("lora_A", "lora_B")) for name in adapters)


def test_classes_of_fsdp2_are_put_aside_and_come_back() -> None:
    def classes() -> list[str]:
        model = tiny_model("qwen3_moe")
        fully_shard(model)
        view, found = ModelView(model), [type(model).__name__]
        with view.published_classes():
            found.append(type(model).__name__)
        return [*found, type(model).__name__, view.family.__name__]

    (found,) = shared_ranks(classes, 1)
    assert found == ["FSDPQwen3MoeForCausalLM", "Qwen3MoeForCausalLM", "FSDPQwen3MoeForCausalLM", "Qwen3MoeForCausalLM"]


def _stage(stage_of_norm: int) -> None:
    whole = {name: tensor.shape for name, tensor in tiny_model("qwen3_moe").state_dict().items()}
    mesh = em.init_mesh(em.ParallelConfig(ep=1, pp=2))
    view = ModelView(em.parallelize(tiny_model("qwen3_moe"), mesh))
    assert view.is_stage
    assert {name: tensor.shape for name, tensor in view.tensors.items()} == whole
    assert ("model.norm.weight" in view.parameters) == (mesh.rank == stage_of_norm)
    held = set(view.parameters)
    assert held < set(whole)
    assert all(view.tensors[name].is_meta == (name not in held) for name in whole)


def test_a_stage_shows_all_names_and_shapes_and_holds_its_own() -> None:
    shared_ranks(_stage, 2, 1)


def test_a_view_is_made_again_after_parameters_were_replaced() -> None:
    model = tiny_model("qwen3_moe")
    before = ModelView(model)
    name = next(iter(before.tensors))
    model.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(torch.zeros(before.tensors[name].shape))
    assert before.tensors[name] is not ModelView(model).tensors[name]
