"""Every argument of a Trainer: what it does to the stock class it does to ours, or it is refused, or has nothing to do.

Each field of the arguments' dataclasses is in exactly one table: `RUN` (both classes train with another value than the
default one, on two ranks, and log and end with the same), `ELSEWHERE` (a test of its own compares it), `REFUSED`,
`WITHOUT_EFFECT` (docs/trainers.md lists both) or `OUTSIDE` (what it changes is not the model's, nor this package's). A
field that a new version brings is in none of them.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer

import expertmesh as em
from expertmesh.integrations import refusals
from tests.integrations.support import (
    CONFIGS,
    ONE_LAYER,
    Job,
    Result,
    even_rows,
    furthest,
    run_script,
    tokenizer,
    uneven_rows,
)
from tests.integrations.test_dpo import pairs
from tests.integrations.test_grpo import ends_often, prompts, reward_of_length
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

ROOT = Path(__file__).parents[2]
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SAVED = {"save_strategy": "steps", "save_steps": 1}
BEST = {**SAVED, "eval_strategy": "steps", "eval_steps": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """`args` has the argument's value and what it needs; the model has one layer where one is enough."""

    args: dict[str, Any]
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: Callable[[], list[dict[str, Any]]] | None = None
    layers: int = 1


def _few() -> list[dict[str, Any]]:
    """Epochs of three steps."""
    return uneven_rows()[:12]


def _with_sizes() -> list[dict[str, Any]]:
    return [{**row, "size": len(row["input_ids"]) % 5} for row in uneven_rows()]


def _texts() -> list[dict[str, Any]]:
    return [{"words": row["prompt"] + row["chosen"]} for row in pairs()]


def _completions() -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs()]


def _turns() -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {
            "messages": [
                {"role": role, "content": row[key]} for role, key in zip(roles, ("prompt", "chosen"), strict=True)
            ]
        }
        for row in pairs()
    ]


def _turn_pairs() -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")},
        }
        for row in pairs()
    ]


def _metrics(predictions: Any, compute_result: bool = True) -> dict[str, float]:
    """Of all that `include_for_metrics` asks for; in batches, of the last one."""
    found = predictions.predictions if isinstance(predictions.predictions, list) else [predictions.predictions]
    figures = {"mean": sum(float(abs(each).mean()) for each in found) / len(found)}
    for name in ("losses", "inputs"):
        if (value := getattr(predictions, name, None)) is not None:
            value = value if hasattr(value, "mean") else value[0]
            figures[name] = float(value.mean())
    return figures


MARKED = (
    "{% for message in messages %}{{ message.role }} {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }} <eos> {% endgeneration %}{% else %}{{ message.content }} {% endif %}{% endfor %}"
)


def _marked() -> Any:
    found = tokenizer()
    found.chat_template = MARKED
    return found


def _cases(needed: dict[str, Any] | None = None, given: dict[str, Any] | None = None, **args: Any) -> dict[str, Case]:
    """A case for each of `args`, with the arguments that it needs to be looked at."""
    return {name: Case({**(needed or {}), name: value}, given or {}) for name, value in args.items()}


OF_TRAINER: dict[str, Case] = {
    **_cases(
        per_device_train_batch_size=1, max_steps=3, learning_rate=1e-2, warmup_steps=2,
        weight_decay=0.1, adam_beta1=0.5, adam_beta2=0.9, adam_epsilon=1e-3, gradient_accumulation_steps=2,
        max_grad_norm=0.1, label_smoothing_factor=0.1, activation_checkpointing=True, gradient_checkpointing=True,
        use_cache=True, neftune_noise_alpha=5.0, torch_empty_cache_steps=1, logging_steps=2,
        logging_nan_inf_filter=False, include_num_input_tokens_seen="all", full_determinism=True, seed=7, data_seed=3,
        dataloader_pin_memory=True, label_names=["labels"],
        train_sampling_strategy="group_by_length", log_on_each_node=False, skip_memory_metrics=False,
    ),
    **_cases(
        EVALUATED, eval_strategy="epoch", eval_steps=1, per_device_eval_batch_size=1,
        prediction_loss_only=True, eval_on_start=True, eval_accumulation_steps=1,
    ),
    **_cases(
        EVALUATED, {"compute_metrics": _metrics}, eval_do_concat_batches=False, eval_use_gather_object=True,
        include_for_metrics=["loss", "inputs"], batch_eval_metrics=True,
    ),
    "num_train_epochs": Case({"num_train_epochs": 0.25, "max_steps": -1}),
    # In three steps cosine differs from the default, in two it does not.
    "lr_scheduler_type": Case({"lr_scheduler_type": "cosine", "max_steps": 3}),
    "lr_scheduler_kwargs": Case(
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}, "max_steps": 3}
    ),
    "eval_delay": Case({"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2}),
    "optim": Case({"optim": "sgd", "learning_rate": 0.1}),
    "average_tokens_across_devices": Case({"average_tokens_across_devices": False, "gradient_accumulation_steps": 2}),
    "activation_checkpointing_kwargs": Case(
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}, layers=2
    ),
    "gradient_checkpointing_kwargs": Case(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    ),
    "logging_strategy": Case({"logging_strategy": "epoch", "max_steps": 4}, rows=_few),
    "dataloader_drop_last": Case(
        {"dataloader_drop_last": True, "per_device_train_batch_size": 5, "max_steps": -1, "num_train_epochs": 2.0},
        rows=_few,
    ),
    "logging_first_step": Case({"logging_first_step": True, "logging_steps": 2}),
    "save_strategy": Case({"save_strategy": "epoch", "max_steps": 4}, rows=_few),
    "save_steps": Case({"save_strategy": "steps", "save_steps": 2, "max_steps": 3}),
    "save_only_model": Case({**SAVED, "save_only_model": True}),
    "save_total_limit": Case({**SAVED, "save_total_limit": 1}),
    "metric_for_best_model": Case({**BEST, "metric_for_best_model": "mean"}, {"compute_metrics": _metrics}),
    "greater_is_better": Case({**BEST, "metric_for_best_model": "loss", "greater_is_better": True}),
    "accelerator_config": Case({"accelerator_config": {"split_batches": True}, "dataloader_drop_last": True}),
    "accelerator_config, seeds": Case({"accelerator_config": {"use_seedable_sampler": False}}),
    "accelerator_config, synced": Case(
        {
            "gradient_accumulation_steps": 2,
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        }
    ),
    "remove_unused_columns": Case({"remove_unused_columns": False}, rows=_with_sizes),
    "length_column_name": Case(
        {"length_column_name": "size", "train_sampling_strategy": "group_by_length"}, rows=_with_sizes
    ),
}  # fmt: skip
OF_SFT: dict[str, Case] = {
    **_cases(
        max_length=8, shuffle_dataset=True, padding_free=True, pad_to_multiple_of=8,
        loss_type="dft", trust_remote_code=True,
    ),
    "model_init_kwargs": Case({"model_init_kwargs": {"attn_implementation": "eager"}}),
    "router_aux_loss_coef": Case({"router_aux_loss_coef": 0.05}, rows=even_rows),
    "chat_template_path": Case({"chat_template_path": "marked.jinja"}, rows=_turns),
    "dataset_text_field": Case({"dataset_text_field": "words"}, rows=_texts),
    "dataset_kwargs": Case({"dataset_kwargs": {"skip_prepare_dataset": True}}),
    "dataset_num_proc": Case({"dataset_text_field": "words", "dataset_num_proc": 2}, rows=_texts),
    "eos_token": Case({"dataset_text_field": "words", "eos_token": "w5"}, rows=_texts),
    "pad_token": Case({"pad_token": "w5"}),
    "truncation_mode": Case({"truncation_mode": "keep_end", "max_length": 8}),
    "packing": Case({"packing": True, "max_length": 40}),
    "packing_strategy": Case({"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    "eval_packing": Case({"packing": True, "eval_packing": False, "max_length": 40, **EVALUATED}),
    "completion_only_loss": Case({"completion_only_loss": False}, rows=_completions),
    "assistant_only_loss": Case({"assistant_only_loss": True}, {"processing_class": _marked}, _turns),
}  # fmt: skip
OF_DPO: dict[str, Case] = {
    **_cases(
        max_length=12, padding_free=True, pad_to_multiple_of=8, loss_type=["hinge"], ld_alpha=0.5,
        f_divergence_type="js_divergence", beta=0.3, use_weighting=True, trust_remote_code=True,
        disable_dropout=False, router_aux_loss_coef=0.05, dataset_num_proc=2, pad_token="w5",
    ),
    "model_init_kwargs": Case({"model_init_kwargs": {"attn_implementation": "eager"}}),
    "truncation_mode": Case({"truncation_mode": "keep_end", "max_length": 12}),
    "label_smoothing": Case({"loss_type": ["robust"], "label_smoothing": 0.1}),
    "loss_weights": Case({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "f_alpha_divergence_coef": Case({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7}),
    "discopop_tau": Case({"loss_type": ["discopop"], "discopop_tau": 1.0}),
}  # fmt: skip
OF_REWARD: dict[str, Case] = {
    **_cases(
        max_length=12, pad_to_multiple_of=8, center_rewards_coefficient=0.1, trust_remote_code=True,
        disable_dropout=False, dataset_num_proc=2, pad_token="w5", eos_token="w5",
    ),
    "model_init_kwargs": Case({"model_init_kwargs": {"attn_implementation": "eager"}}),
    "chat_template_path": Case({"chat_template_path": "marked.jinja"}, rows=_turn_pairs),
}  # fmt: skip
OF_GRPO: dict[str, Case] = {
    **_cases(
        disable_dropout=True, num_generations=2, max_completion_length=6, shuffle_dataset=False, pad_to_multiple_of=8,
        generation_batch_size=16, steps_per_generation=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.05,
        generation_kwargs={"no_repeat_ngram_size": 2}, repetition_penalty=1.2, cache_implementation="dynamic",
        beta=0.1, num_iterations=2, reward_weights=[0.5], scale_rewards="batch", loss_type="grpo",
        multi_objective_aggregation="normalize_then_sum", mask_truncated_completions=True, top_entropy_quantile=0.5,
        entropy_coef=0.1, use_adaptive_entropy=True, trust_remote_code=True,
        router_aux_loss_coef=0.05, log_completions=True, remove_unused_columns=True, chat_template_kwargs={"a": 1},
    ),
    **_cases(
        {"num_iterations": 2, "learning_rate": 1e-2}, epsilon=0.01, epsilon_high=0.02, delta=1.05,
        off_policy_mask_threshold=0.01, importance_sampling_level="sequence",
    ),
    **_cases({"num_iterations": 2, "loss_type": "sapo"}, sapo_temperature_neg=2.0, sapo_temperature_pos=2.0),
    **_cases(
        {"num_iterations": 2, "loss_type": "vespo"}, vespo_k_pos=1.0, vespo_lambda_pos=1.0, vespo_k_neg=1.0,
        vespo_lambda_neg=1.0,
    ),
    **_cases(
        {"use_adaptive_entropy": True, "entropy_coef": 0.1}, entropy_coef_min=0.05, entropy_coef_max=0.06,
        entropy_coef_delta=0.02, entropy_target=0.01,
    ),
    **_cases({"log_completions": True}, num_completions_to_print=1, log_unique_prompts=True, log_multimodal=False),
    "use_bias_correction_kl": Case({"beta": 0.1, "num_iterations": 2, "use_bias_correction_kl": False}),
    "num_generations_eval": Case({**EVALUATED, "per_device_eval_batch_size": 4, "num_generations_eval": 2}),
    "model_init_kwargs": Case({"model_init_kwargs": {"attn_implementation": "eager"}}),
}  # fmt: skip
RUN = {Trainer: OF_TRAINER, SFTTrainer: OF_SFT, DPOTrainer: OF_DPO, RewardTrainer: OF_REWARD, GRPOTrainer: OF_GRPO}

# Cases of one run, none of which hides what another one does; where the run differs, each is run alone.
TOGETHER: dict[type[Trainer], list[tuple[str, ...]]] = {
    Trainer: [
        ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "max_steps"),
        ("lr_scheduler_type", "label_smoothing_factor", "neftune_noise_alpha", "seed", "label_names"),
        ("gradient_accumulation_steps", "warmup_steps", "data_seed", "use_cache", "logging_steps", "log_on_each_node"),
        ("activation_checkpointing", "train_sampling_strategy", "include_num_input_tokens_seen"),
        ("gradient_checkpointing", "per_device_train_batch_size", "logging_nan_inf_filter"),
        ("full_determinism", "torch_empty_cache_steps", "dataloader_pin_memory", "skip_memory_metrics"),
        ("eval_steps", "per_device_eval_batch_size", "eval_on_start", "eval_accumulation_steps"),
        ("eval_strategy", "prediction_loss_only"),
        ("eval_use_gather_object", "include_for_metrics"),
        ("accelerator_config, seeds", "logging_first_step"),
    ],
    SFTTrainer: [
        ("shuffle_dataset", "pad_to_multiple_of", "loss_type", "trust_remote_code", "model_init_kwargs"),
        ("dataset_text_field", "dataset_num_proc", "eos_token"),
        ("dataset_kwargs", "pad_token"),
    ],
    DPOTrainer: [
        ("beta", "disable_dropout", "trust_remote_code", "dataset_num_proc", "pad_token", "model_init_kwargs"),
        ("router_aux_loss_coef", "use_weighting", "pad_to_multiple_of"),
    ],
    RewardTrainer: [
        ("pad_to_multiple_of", "center_rewards_coefficient", "trust_remote_code", "disable_dropout", "pad_token"),
        ("dataset_num_proc", "eos_token", "model_init_kwargs"),
    ],
    GRPOTrainer: [
        ("temperature", "top_k", "repetition_penalty"),
        ("top_p", "generation_kwargs", "cache_implementation"),
        ("disable_dropout", "trust_remote_code", "chat_template_kwargs", "num_iterations", "model_init_kwargs"),
        ("shuffle_dataset", "pad_to_multiple_of", "max_completion_length"),
        ("num_generations", "steps_per_generation", "remove_unused_columns"),
        ("beta", "router_aux_loss_coef", "scale_rewards", "reward_weights", "loss_type", "entropy_coef"),
        ("multi_objective_aggregation", "mask_truncated_completions", "top_entropy_quantile"),
        ("epsilon", "epsilon_high"),  # of other sides of the ratio
        ("sapo_temperature_neg", "sapo_temperature_pos"),
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        ("use_adaptive_entropy", "entropy_coef_delta", "entropy_target"),
        ("entropy_coef_min", "entropy_coef_max"),
        ("log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal"),
    ],
}

# Each with the test that compares it.
ELSEWHERE = {
    "bf16": "test_precision.py",
    "load_best_model_at_end": "test_resume.py",
    "precompute_ref_log_probs": "test_dpo.py",
    "max_tool_calling_iterations": "test_grpo.py",
    "use_vllm": "test_grpo.py",
    "vllm_mode": "test_grpo.py",
    "vllm_importance_sampling_correction": "test_grpo.py",
}
# As docs/trainers.md has them, with a value that stops.
REFUSED: dict[str, Any] = {
    "fp16": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "torch_compile": True,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "push_to_hub": True,
    "parallelism_config": object(),
    "fsdp": "full_shard",
    "deepspeed": "ds.json",
    "debug": "underflow_overflow",
    "optim_target_modules": "all-linear",
    "activation_offloading": True,
    "sync_ref_model": True,
    "cast_lm_head_to_fp32": True,
    "use_transformers_continuous_batching": True,
    "use_transformers_paged": True,
}
# Arguments that only set another one, which is refused.
SETS = {
    "torch_compile_backend": "torch_compile",
    "torch_compile_mode": "torch_compile",
    "use_transformers_paged": "use_transformers_continuous_batching",
}
# As docs/trainers.md lists them.
WITHOUT_EFFECT = (
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("ds3_gather_for_generation", "fsdp_config", "liger_kernel_config", "optim_args"),
    *("ref_model_mixup_alpha", "ref_model_sync_steps", "transformers_continuous_batching_config"),
    *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
)
# What reads them knows nothing of how the model is held.
OUTSIDE = {
    "output_dir": "each run has one",
    "tf32": "a switch of torch, set while the arguments are made",
    "use_cpu": "each run has it",
    "ddp_backend": "accelerate starts the process group with it, while the arguments are made",
    "ddp_timeout": "accelerate starts the process group with it, while the arguments are made",
    "dataloader_num_workers": "torch's DataLoader's, as all below; the ranks of these tests may not start processes",
    "dataloader_persistent_workers": "",
    "dataloader_prefetch_factor": "",
    "dataloader_multiprocessing_context": "",
    "dataloader_in_order": "",
    "ignore_data_skip": "of the data after a resume, which brings no experts back in the stock class",
    "restore_callback_states_from_checkpoint": "of callbacks after a resume",
    "log_level": "of transformers' logger",
    "log_level_replica": "of transformers' logger",
    "disable_tqdm": "the bar",
    "report_to": "test_callbacks.py has the callbacks of trackers",
    "run_name": "a tracker's",
    "project": "a tracker's",
    "trackio_space_id": "a tracker's",
    "trackio_bucket_id": "a tracker's",
    "trackio_static_space_id": "a tracker's",
    "do_train": "for scripts, and read by no Trainer",
    "do_eval": "for scripts, and read by no Trainer",
    "do_predict": "for scripts, and read by no Trainer",
    "resume_from_checkpoint": "for scripts, and read by no Trainer",
    "local_rank": "read by no Trainer",
    "precompute_ref_batch_size": "rows that the reference sees at once",
    "log_completions_hub_repo": "uploads what log_completions writes",
    "vllm_model_impl": "vLLM's, as all below",
    "vllm_enable_sleep_mode": "",
    "vllm_structured_outputs_regex": "",
    "vllm_server_base_url": "",
    "vllm_server_host": "",
    "vllm_server_port": "",
    "vllm_server_timeout": "",
    "vllm_group_port": "",
    "vllm_gpu_memory_utilization": "",
    "vllm_max_model_length": "",
    "vllm_tensor_parallel_size": "",
    "vllm_importance_sampling_mode": "of log-probabilities that vLLM returns, as all below",
    "vllm_importance_sampling_clip_max": "",
    "vllm_importance_sampling_clip_min": "",
    "vllm_importance_sampling_cap": "",
}


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_argument_is_known(kind: type[Trainer]) -> None:
    names = {field.name for field in dataclasses.fields(CONFIGS[kind])}
    run = {name.partition(",")[0] for name in {**RUN[Trainer], **RUN[kind]}}
    unknown = names - run - {*ELSEWHERE, *REFUSED, *WITHOUT_EFFECT, *OUTSIDE}
    assert not unknown, f"new arguments of {kind.__name__}: compare, refuse, or list them"
    every = {field.name for config in CONFIGS.values() for field in dataclasses.fields(config)}
    assert {*ELSEWHERE, *REFUSED, *WITHOUT_EFFECT, *OUTSIDE} <= every, "arguments that are gone"


def test_the_docs_have_what_is_refused_and_what_has_no_effect() -> None:
    text = (ROOT / "docs" / "trainers.md").read_text()
    refused, _, without = text.partition("## Arguments without effect")
    refused = refused.partition("## What is refused")[2]
    assert [name for name in (*REFUSED, *refusals.REFUSED_CALLBACKS) if f"`{name}`" not in refused] == []
    assert [name for name in WITHOUT_EFFECT if f"`{name}`" not in without] == []


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_refused_stops_by_its_name(name: str, tmp_path: Path) -> None:
    kind = next(kind for kind, config in CONFIGS.items() if hasattr(config, name))
    options = {name: REFUSED[name]} if name in SETS else {}
    args = CONFIGS[kind](str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    setattr(args, name, REFUSED[name])
    ours: Any = em.trainer(kind)
    with refused("trainer.unsupported-argument", naming=f"args.{SETS.get(name, name)} is"):
        ours(model="nowhere/to-be-found", args=args, parallel=em.ParallelConfig(ep=2))


def _runs(kind: type[Trainer]) -> dict[tuple[str, ...], Case]:
    """Every case once, by the names of the cases that one run has."""
    together = TOGETHER[kind]
    in_some = {name for names in together for name in names}
    return {
        names: _merged({name: RUN[kind][name] for name in names})
        for names in [*together, *((name,) for name in RUN[kind] if name not in in_some)]
    }


def _merged(cases: dict[str, Case]) -> Case:
    """One case of several; a value that is a case's subject stands before one that others need."""
    subjects = {name: case.args[name] for name, case in cases.items() if name in case.args}
    needed: dict[str, Any] = {}
    for name, value in (item for case in cases.values() for item in case.args.items()):
        assert needed.setdefault(name, value) == value or name in subjects, f"{[*cases]} need other values of {name}"
    given = {name: value for case in cases.values() for name, value in case.given.items()}
    (rows,) = {case.rows for case in cases.values()}
    return Case({**needed, **subjects}, given, rows, max(case.layers for case in cases.values()))


@functools.cache
def _results(kind: type[Trainer], directory: Path) -> list[dict[tuple[str, ...], Any]]:
    """What ours and the stock class end with in every run, each by one launch of two ranks."""
    return _both(kind, directory, _runs(kind))


def _both(kind: type[Trainer], directory: Path, runs: dict[tuple[str, ...], Case]) -> list[Any]:
    base = ends_often() if kind is GRPOTrainer else tiny_model("qwen3_moe", **ONE_LAYER)
    base.save_pretrained(directory / "base")
    (directory / "marked.jinja").write_text(MARKED)
    return [shared_ranks(_every_run, 2, kind, directory, runs, p)[0] for p in (em.ParallelConfig(ep=2), None)]


def _every_run(
    kind: type[Trainer], directory: Path, runs: dict[tuple[str, ...], Case], parallel: em.ParallelConfig | None
) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for names, case in runs.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        random.seed(0)
        try:
            found[names] = _train(kind, case, directory, parallel, names[0])
        except Exception as error:
            found[names] = f"{type(error).__name__}: {error}"
    return found


def _train(kind: type[Trainer], case: Case, directory: Path, parallel: em.ParallelConfig | None, name: str) -> Result:
    # A second step is the first one with moments, a later rate and, of a policy, a distance from its reference.
    base: dict[str, Any] = {"max_steps": 2}
    given = {key: value() if value is _marked else value for key, value in case.given.items()}
    rows = case.rows
    if kind in (DPOTrainer, RewardTrainer):
        rows = rows or pairs
    if kind is DPOTrainer:
        base |= {"beta": 0.5}
    if kind is GRPOTrainer:
        rows, given = rows or prompts, {"reward_funcs": reward_of_length, **given}
        base |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    args = {**base, **case.args}
    if "chat_template_path" in args:
        args["chat_template_path"] = str(directory / args["chat_template_path"])
    output = directory / f"{'stock' if parallel is None else 'ours'}" / name
    changes, model = ({"num_hidden_layers": case.layers}, None) if kind is Trainer else ({}, str(directory / "base"))
    job = Job(output, kind, args, given, changes, rows=rows or uneven_rows, model=model, after=_aftermath)
    return run_script(job, parallel)


def _aftermath(trainer: Any) -> dict[str, Any]:
    """What is left beside weights: checkpoints, and what the model says of its tokens."""
    output, model = Path(trainer.args.output_dir), getattr(trainer.model, "module", trainer.model)
    state, config, generation = trainer.state, model.config, getattr(model, "generation_config", None)
    return {
        "checkpoints": sorted(path.name for path in output.glob("checkpoint-*")),
        "best": Path(state.best_model_checkpoint or "").name,
        "tokens": state.num_input_tokens_seen,
        "ends": (config.eos_token_id, config.pad_token_id, generation.eos_token_id if generation else None),
        "use_cache": config.use_cache,
    }


TIMED = ("runtime", "per_second", "_mem_", "preparation", "total_flos", "step_time")


@pytest.mark.slow(
    why="trains 150 times, ours and the stock classes; that each argument is known, and in the docs, stays"
)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, cases in RUN.items() for name in cases],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_argument_does_what_it_does_to_the_stock_class(
    kind: type[Trainer], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / f"arguments-{kind.__name__}"
    directory.mkdir(exist_ok=True)
    names = next(names for names in _runs(kind) if name in names)
    try:
        _compare(*(results[names] for results in _results(kind, directory)))
    except AssertionError:
        differing = _differing_alone(kind, names, directory / names[0]) if len(names) > 1 else {}
        if name in differing:
            raise differing[name] from None
        if not differing:  # only together
            raise


@functools.cache
def _differing_alone(kind: type[Trainer], names: tuple[str, ...], directory: Path) -> dict[str, AssertionError]:
    """Which cases of a run that differs are why: each is run by itself."""
    both = _both(kind, directory, {(name,): RUN[kind][name] for name in names})
    found = {}
    for name in names:
        try:
            _compare(*(results[name,] for results in both))
        except AssertionError as error:
            found[name] = error
    return found


def _compare(ours: Result | str, theirs: Result | str) -> None:
    """Everything that is logged but times, what is left on disk, and each weight to 5e-4 of its move."""
    assert not isinstance(theirs, str), theirs
    assert not isinstance(ours, str), ours
    assert ours.extra == theirs.extra
    assert len(ours.logs) == len(theirs.logs)
    for here, there in zip(ours.logs, theirs.logs, strict=True):
        keys = {key for key in here.keys() | there.keys() if not any(part in key for part in TIMED)}
        for key in keys:
            a, b = here[key], there[key]
            # Rewards are small differences of log-probabilities of whole answers, in which fp32 leaves fewer digits.
            absolute = 1e-5 if "reward" in key else 2e-6
            equal = a == b or (a != a and b != b)
            assert equal or math.isclose(a, b, rel_tol=2e-5, abs_tol=absolute), (key, a, b)
    distance, parameter = furthest(ours.weights, theirs)
    assert distance <= 5e-4, (parameter, distance)
