"""What Trainers cannot do with a sharded model stops with one sentence that names it, before anything is loaded."""

import copy
import functools
import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import trl
from datasets import Dataset
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import BEMACallback, DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOTrainer, SFTConfig, SFTTrainer

import expertmesh as em
from expertmesh.config.errors import InputError
from expertmesh.integrations import refusals
from expertmesh.integrations.trainer import ShardedTrainer
from tests.integrations.support import Job, even_rows, sharded, tokenizer
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

# Parts of arguments, and those that say whatever they say; arguments that are refused whole are in test_arguments.py.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "even_batches is False": {"accelerator_config": AcceleratorConfig(even_batches=False)},
    "args.use_vllm is": {"use_vllm": True},
    "mixed precision is fp8": {"mixed_precision": "fp8"},
    "args.chat_template_path is": {"chat_template_path": "Qwen/Qwen3-0.6B"},
    "model_init_kwargs has use_kernels": {"model_init_kwargs": {"use_kernels": True}},
    "has offload=True": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
    "use_reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
}


def _make(args: Any, kind: type[Trainer] = SFTTrainer, **given: Any) -> None:
    ours: Any = em.trainer(kind)
    ours(**{"model": "nowhere/to-be-found", "args": args, "parallel": em.ParallelConfig(ep=2), **given})


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return SFTConfig(str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none")


@pytest.mark.parametrize("naming", ARGUMENTS)
def test_arguments_by_name(naming: str, args: Any) -> None:
    for name, value in ARGUMENTS[naming].items():
        setattr(args, name, value)
    with refused("trainer.unsupported-argument", naming=naming):
        _make(args)


@pytest.mark.parametrize("name", ["quantization_config", "optimizers"])
def test_what_is_given_beside_them(name: str, args: Any) -> None:
    with refused("trainer.unsupported-argument", naming=name):
        _make(args, **{name: (object(), None) if name == "optimizers" else object()})


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_a_server_that_only_some_ranks_would_ask(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_has_vllm", lambda: True)
    for own in ({"vllm_mode": "server"}, {"vllm_tensor_parallel_size": 2}):
        args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", use_vllm=True, **own)
        with refused("trainer.unsupported-argument", naming=name):
            _make(args, GRPOTrainer, **{name: [print]})


@pytest.mark.parametrize("parallel", [None, em.ParallelConfig()], ids=["none", "auto"])
def test_without_an_ep_the_argument_is_named(parallel: Any, args: Any) -> None:
    with refused("trainer.ep-not-given", naming="parallel=em.ParallelConfig(ep=N)"):
        _make(args, parallel=parallel)


def test_a_model_made_later_and_no_model(args: Any) -> None:
    with refused("trainer.unsupported-argument", naming="model_init"):
        _make(args, Trainer, model=None, model_init=lambda: tiny_model("qwen3_moe"))
    with refused("trainer.unsupported-model", naming="not given"):
        _make(args, Trainer, model=None)


class _OnCpu(SFTConfig):  # type: ignore[misc]
    """TRL's own are for bf16, which transformers has on GPUs alone."""

    def __init__(self, output_dir: str) -> None:
        super().__init__(output_dir, use_cpu=True, bf16=False)


def _without_args(directory: Path) -> list[dict[str, Any]]:
    os.chdir(directory)  # Trainers without arguments make their output_dir where they run
    for module in (trl, sys.modules[SFTTrainer.__module__]):
        mock.patch.object(module, "SFTConfig", _OnCpu).start()  # ended with this function's ranks
    os.environ |= {"HF_HUB_OFFLINE": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    given = {"model": tiny_model("qwen3_moe"), "processing_class": tokenizer()}
    found = []
    for kind in (SFTTrainer, Trainer):
        rows = {"train_dataset": Dataset.from_list(even_rows())}
        ours: Any = em.trainer(kind)
        found += [ours(parallel=em.ParallelConfig(ep=1), **copy.deepcopy(given), **rows).args.to_dict()]
        found += [kind(**copy.deepcopy(given), **rows).args.to_dict()]
    return found


def test_without_args_the_stock_ones_are_taken(tmp_path: Path) -> None:
    ours, stock, plain, stock_plain = shared_ranks(_without_args, 1, tmp_path)[0]
    assert ours == stock
    assert ours["output_dir"].endswith("-SFT")
    assert plain == stock_plain


def test_arguments_are_bound_by_name_wherever_they_stand(args: Any) -> None:
    ours: Any = em.trainer(SFTTrainer)
    args.torch_compile = True
    with refused("trainer.unsupported-argument", naming="torch_compile"):
        ours("nowhere/to-be-found", args, parallel=em.ParallelConfig(ep=2))


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_axes_whose_ranks_share_rows(axis: str, args: Any) -> None:
    with refused("trainer.shared-rows", naming="expertmesh train"):
        _make(args, parallel=em.ParallelConfig(ep=2, **{axis: 2}))


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_8bit", "lion_32bit", "galore_adamw"])
def test_optimizers_that_look_at_whole_weights(optimizer: str, args: Any) -> None:
    args.optim = optimizer
    with refused("trainer.unsupported-optimizer", naming=optimizer):
        _make(args)


def test_an_optimizer_of_ones_own_that_looks_at_whole_weights(args: Any) -> None:
    with refused("trainer.unsupported-optimizer", naming="Adafactor"):
        _make(args, optimizer_cls_and_kwargs=(torch.optim.Adafactor, {}))


@pytest.mark.parametrize(
    ("moe", "kind"),
    [
        (em.MoeConfig(aux_loss_coef=0.01), SFTTrainer),
        (em.MoeConfig(aux_loss_coef=0.01), Trainer),
        (em.MoeConfig(z_loss_coef=0.01), SFTTrainer),
        (em.MoeConfig(bias_update_rate=0.01), SFTTrainer),
    ],
)
def test_router_losses_and_biases_of_our_own_step(moe: em.MoeConfig, kind: type[Trainer], args: Any) -> None:
    with refused("trainer.router-loss"):
        _make(args, kind, moe=moe)


@pytest.fixture
def preferences(tmp_path: Path) -> DPOConfig:
    return DPOConfig(str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none")


@pytest.mark.parametrize("targets", [["attention", "lm_head"], ["lm_*"], ["*"]])
def test_adapters_that_would_not_be_trained(targets: list[str], args: Any) -> None:
    with refused("trainer.lora-on-head", naming="lm_head"):
        _make(args, lora=em.LoraConfig(targets=targets))


@pytest.mark.parametrize(
    ("targets", "whole"), [(["q_proj", "lm_head"], None), ("lm_.*", None), (["q_proj"], ["lm_head"]), ("q", ["head"])]
)
def test_an_adapter_to_go_on_from_would_not_be_trained(targets: Any, whole: Any, args: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"target_modules": targets, "modules_to_save": whole}))
    with refused("trainer.lora-on-head", naming="lm_head"):
        _make(args, lora=em.LoraConfig(from_adapter=str(tmp_path)))


def test_dropout_of_adapters_that_trl_turns_off(preferences: DPOConfig) -> None:
    with refused("trainer.lora-dropout", naming="0.05"):
        _make(preferences, DPOTrainer, lora=em.LoraConfig(dropout=0.05))


@pytest.mark.parametrize(
    ("family", "factor"), [("qwen3_moe", "router_aux_loss_coef 0.001"), ("jetmoe", "aux_loss_coef 0.01")]
)
def test_a_router_loss_that_the_config_alone_tells_of(family: str, factor: str, args: Any, tmp_path: Path) -> None:
    """There are no weights to read."""
    tiny_model(family, output_router_logits=True).config.save_pretrained(tmp_path / "base")
    with refused("trainer.router-loss", naming=f"output_router_logits and {factor}"):
        _make(args, Trainer, model=str(tmp_path / "base"))


def test_adapters_of_peft(args: Any, preferences: DPOConfig) -> None:
    def adapted(**options: Any) -> Any:
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(tiny_model("qwen3_moe"), config)  # type: ignore[arg-type]

    with refused("trainer.lora-dropout", naming="0.05"):
        _make(preferences, DPOTrainer, model=adapted(lora_dropout=0.05))
    with refused("adapter.unsupported-option", naming="use_dora"):
        _make(args, lora=peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    with refused("trainer.lora-on-head", naming="lm_head"):
        _make(args, model=adapted(modules_to_save=["lm_head"]))
    with refused("adapter.not-lora", naming="PROMPT_TUNING"):
        _make(args, peft_config=peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with refused("adapter.ambiguous-targets", naming="down_proj"):
        _make(args, peft_config=peft.LoraConfig(target_modules=["down_proj"]))
    with refused("trainer.unsupported-argument", naming="peft_config"):
        _make(args, peft_config=peft.LoraConfig(target_modules=["q_proj"]), lora=em.LoraConfig())
    on_head = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    with refused("trainer.lora-on-head", naming="lm_head"):
        _make(args, model=peft.get_peft_model(tiny_model("qwen3_moe"), on_head))  # type: ignore[arg-type]
    with refused("trainer.unsupported-model", naming="copy of the adapters"):
        _make(preferences, DPOTrainer, model=adapted())


def test_callbacks_that_need_whole_weights(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Derived(BEMACallback):  # type: ignore[misc]
        pass

    for callback in (BEMACallback(), BEMACallback, Derived()):
        with refused("trainer.unsupported-callback", naming="model.parameters()"):
            _make(args, callbacks=[callback])
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    args.report_to = ["wandb"]
    with refused("trainer.unsupported-callback", naming="WANDB_WATCH"):
        _make(args)


def test_a_refusal_ends_a_script_as_it_ends_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    others: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: others.append(what))
    em.trainer(SFTTrainer)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(InputError, InputError("no such thing"), None)
    assert ended.value.code == 2
    assert capfd.readouterr().err == "error: no such thing\n"
    bug = ValueError("of somebody else's")
    sys.excepthook(ValueError, bug, None)
    assert others == [(ValueError, bug, None)]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(InputError, InputError("at a prompt"), None)
    assert len(others) == 2


SCRIPT = """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
import expertmesh as em
args = SFTConfig("out", use_cpu=True, bf16=False, report_to="none")
data = Dataset.from_list([{"text": "a"}])
em.trainer(SFTTrainer)(model="nowhere", args=args, parallel=em.ParallelConfig(ep=2, tp=2), train_dataset=data)
"""


@pytest.mark.slow(why="a launch of three processes; test_a_refusal_ends_a_script has it without one")
def test_under_torchrun_a_refusal_is_one_sentence_of_one_rank(tmp_path: Path) -> None:
    """Beside what torchrun says itself, whose summary has it as well."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    told = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, ended.stderr
    assert "parallel.tp is 2" in told[0]
    assert ended.stderr.count("Traceback") == 1
    # Which rank torchrun takes for the root cause is a race; the sentence is the one that was reported.
    assert "parallel.tp is 2" in ended.stderr.partition("Root Cause")[2]


def test_classes_that_are_not_known_to_train_right() -> None:
    with refused("trainer.unsupported-class", naming="RLOOTrainer"):
        em.trainer(RLOOTrainer)
    with refused("trainer.unsupported-class", naming="Seq2SeqTrainer"):
        em.trainer(Seq2SeqTrainer)
    not_a_class: Any = dict
    with refused("trainer.unsupported-class", naming="dict"):
        em.trainer(not_a_class)


@pytest.mark.parametrize("method", refusals.OVERRIDDEN)
def test_a_version_whose_methods_are_others_is_refused(method: str) -> None:
    def other(self: Any, something_new: int) -> None:
        """A version to come."""

    changed = types.new_class("ChangedTrainer", (SFTTrainer,), exec_body=lambda body: body.update({method: other}))
    with refused("trainer.unsupported-version", naming=method):
        em.trainer(changed)


@pytest.mark.parametrize("method", refusals.OVERRIDDEN)
def test_a_method_of_ones_own_is_called_or_refused(method: str) -> None:
    calls_it = "super()" in inspect.getsource(getattr(ShardedTrainer, method))

    class Mine(SFTTrainer):  # type: ignore[misc]
        pass

    setattr(Mine, method, functools.wraps(getattr(SFTTrainer, method))(lambda self, *args, **kwargs: None))
    if calls_it:
        assert issubclass(em.trainer(Mine), Mine)
    else:
        with refused("trainer.unsupported-class", naming=f"Mine has a {method} of its own"):
            em.trainer(Mine)


@pytest.mark.parametrize(("kind", "name"), [(DPOTrainer, "hash_module"), (GRPOTrainer, "VLLMGeneration")])
def test_a_version_of_trl_without_what_is_exchanged_is_refused(
    kind: type[Trainer], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules[kind.__module__], name)
    with refused("trainer.unsupported-version", naming=name):
        em.trainer(kind)


def test_a_class_derived_from_a_known_one_is_taken_and_taken_once() -> None:
    class Mine(SFTTrainer):  # type: ignore[misc]
        pass

    ours = em.trainer(Mine)
    assert ours.__name__ == "Mine"
    assert issubclass(ours, Mine)
    assert em.trainer(ours) is ours


def test_what_shows_on_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Job(tmp_path, kind=Trainer, changes={"output_router_logits": True})
    with refused_on_ranks("trainer.router-loss", naming="output_router_logits"):
        sharded(plain, 2, ep=2)
    monkeypatch.setattr(refusals, "_adapts_head", lambda lora: False)  # as if the head had another name
    on_head = Job(tmp_path, given={"lora": em.LoraConfig(targets=["lm_*"])})
    with refused_on_ranks("trainer.lora-on-head", naming="lm_head"):
        sharded(on_head, 2, ep=2)


@pytest.mark.parametrize("what", ["FSDP", "DeepSpeed", "a parallelism config"])
def test_sharding_that_accelerate_launch_has_switched_on(what: str) -> None:
    """By environment variables, of which accelerate makes plugins on accelerators alone."""
    accelerator = types.SimpleNamespace(parallelism_config=object() if "config" in what else None)
    trainer: Any = types.SimpleNamespace(
        accelerator=accelerator, is_fsdp_enabled=what == "FSDP", is_deepspeed_enabled=what == "DeepSpeed"
    )
    with refused("trainer.unsupported-argument", naming=what):
        refusals.refuse_launcher(trainer)


def test_ranks_that_accelerate_does_not_see(tmp_path: Path) -> None:
    with refused_on_ranks("trainer.processes-differ", naming="use_cpu"):
        sharded(Job(tmp_path, args={"use_cpu": False}), 2, ep=2)


def test_a_model_that_is_sharded_already(tmp_path: Path) -> None:
    def make() -> None:
        args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
        model = em.parallelize(tiny_model("qwen3_moe"), em.init_mesh(em.ParallelConfig(ep=2)))
        _make(args, model=model)

    with refused_on_ranks("trainer.unsupported-model", naming="sharded already"):
        shared_ranks(make, 2)
