"""Explain pydantic's validation errors, one sentence per problem: where, which key and value, why, how to mend it.

What a key accepts is read from the JSON schema of the sections, so no sentence can disagree with the check. An unknown
key is answered with the key that was probably meant, or the section that it belongs under; for that the tables below
list what other trainers call our keys: PEFT, TRL, transformers' TrainingArguments, Axolotl, LLaMA-Factory, ms-swift,
Unsloth, Megatron.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from expertmesh.config.errors import InputError
from expertmesh.config.yaml_text import Path, dotted

# Our key as it is to be written, then other trainers' names for it. A name that is a key of ours is not listed.
THEIRS = {
    "model.name_or_path": "base_model model_id model_name model_name_or_path pretrained_model_name_or_path",
    "model.revision": "model_revision revision_of_model",
    "model.attention": "attn_implementation attn_impl flash_attn flash_attention sdp_attention",
    "precision.params": "params_dtype master_dtype",
    "precision.compute": "torch_dtype bf16 fp16 mixed_precision compute_dtype",
    "precision.frozen: nf4": "load_in_4bit bnb_4bit_quant_type quant_bits quantization_bit",
    "precision.frozen: float8": "load_in_8bit",
    "data.train": "dataset datasets dataset_name dataset_path train_file train_dataset data_path data_files",
    "data.eval": "eval_dataset test_datasets val_dataset validation_file",
    "data.max_length": "max_seq_length max_seq_len sequence_len seq_len seq_length cutoff_len block_size",
    "data.packing": "sample_packing packing_strategy",
    "data.stream": "streaming",
    "data.chat_template": "chat_template_path chat_template_jinja template",
    "data.template_args": "chat_template_kwargs",
    "data.on_overlong": "truncation_strategy excess_length_strategy",
    "data.loss_on: all": "train_on_inputs",
    "data.loss_on": "assistant_only_loss completion_only_loss train_on_responses_only mask_history roles_to_train",
    "data.train.0.columns: {text: NAME}": "dataset_text_field",
    "data.train.0.columns": "column_map field_messages field_instruction field_input field_output field_system "
    "input_key output_key prompt_key chosen_key rejected_key",
    "data.train.0.max_rows": "max_samples max_train_samples",
    "data.train.0.weight": "mixing_probs interleave_probs",
    "data.prepared_path": "dataset_prepared_path tokenized_path",
    "lora": "adapter peft_config peft_type train_type tuner_type finetuning_type",
    "lora.r": "lora_r lora_rank peft_lora_r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules target_parameters lora_target lora_target_modules lora_target_parameters",
    "lora.targets: [all-linear]": "lora_target_linear",
    "lora.init": "init_lora_weights",
    "lora.from_adapter": "lora_model_dir adapter_name_or_path",
    "lora.use_rslora": "peft_use_rslora",
    "lora.modules_to_save": "lora_modules_to_save",
    "objective.name": "rl rlhf_type stage",
    "objective.beta": "dpo_beta rl_beta pref_beta orpo_alpha",
    "objective.gamma": "simpo_gamma",
    "objective.desirable_weight": "kto_chosen_weight kto_desirable_weight",
    "objective.undesirable_weight": "kto_rejected_weight kto_undesirable_weight",
    "objective.teacher": "teacher_model_name_or_path teacher_model",
    "optim.name": "optimizer optimizer_name",
    "optim.learning_rate": "lr",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.max_grad_norm": "gradient_clipping grad_clip clip_grad max_norm",
    "schedule.name": "lr_scheduler_type lr_scheduler scheduler",
    "schedule.min_ratio": "cosine_min_lr_ratio min_lr_ratio min_lr lr_scheduler_kwargs",
    "schedule.warmup_ratio": "lr_warmup_ratio",
    "schedule.warmup_steps": "lr_warmup_steps num_warmup_steps",
    "train.global_batch_size": "batch_size train_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size",
    "train.num_epochs": "epochs num_train_epochs max_epochs",
    "train.max_steps": "train_iters total_steps num_steps",
    "train.eval_every_steps": "eval_steps eval_strategy evaluation_strategy evals_per_epoch eval_interval",
    "train.early_stop.patience": "early_stopping_patience",
    "train.seed": "data_seed random_seed",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint recompute_granularity",
    "train.compile": "torch_compile use_compile",
    "train.deterministic": "full_determinism",
    "parallel.ep": "ep_size expert_parallel_size expert_model_parallel_size expert_parallel_degree",
    "parallel.tp": "tp_size tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
    "parallel.cp": "cp_size context_parallel_size context_parallel_degree sequence_parallel_size ulysses_size",
    "parallel.pp": "pp_size pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree",
    "parallel.fsdp": "dp_shard_size fsdp_size data_parallel_shard_degree",
    "parallel.replicate": "dp_replicate_size data_parallel_replicate_degree",
    "moe.aux_loss_coef": "router_aux_loss_coef moe_aux_loss_coeff moe_aux_loss_coef",
    "moe.z_loss_coef": "router_z_loss_coef moe_z_loss_coeff",
    "moe.bias_update_rate": "moe_router_bias_update_rate load_balance_coeff",
    "moe.router: frozen": "freeze_router",
    "moe.dispatch": "moe_token_dispatcher_type moe_flex_dispatcher_backend",
    "moe.dispatch: deepep": "moe_enable_deepep enable_deepep",
    "moe.compute": "moe_grouped_gemm experts_implementation",
    "checkpoint.every_steps": "save_steps save_strategy saves_per_epoch save_interval",
    "checkpoint.keep_last": "save_total_limit max_checkpoints",
    "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "distributed.timeout_seconds": "ddp_timeout nccl_timeout",
    "log.every_steps": "logging_steps log_interval",
    "log.report_to": "use_wandb use_tensorboard logging_dir",
    "log.project": "wandb_project project_name mlflow_experiment_name",
    "log.run_name": "wandb_name wandb_run_name experiment_name",
}
ELSEWHERE = {theirs: ours for ours, names in THEIRS.items() for theirs in names.split()}
"""Names that other trainers use for our keys."""

DERIVED = {
    "gradient_accumulation_steps": "train.global_batch_size, train.micro_batch_size and the data ranks",
    "efsdp": "parallel.fsdp and parallel.ep",
    "world_size": "the number of ranks (--nproc, or the launcher)",
    "nproc_per_node": "the number of ranks (--nproc, or the launcher)",
    "local_rank": "the launcher",
    "dataset_num_proc": "the ranks of a node, which share the work, or prepare --workers",
    "preprocessing_num_workers": "the ranks of a node, which share the work, or prepare --workers",
    "fsdp_config": "section parallel, as FSDP2 shards every model",
    "fsdp_version": "section parallel, as FSDP2 shards every model",
    "deepspeed": "section parallel, as FSDP2 shards every model",
    "ddp_find_unused_parameters": "section parallel, as FSDP2 shards every model",
    "pad_to_sequence_len": "data.packing",
    "group_by_length": "data.packing",
    "overwrite_output_dir": "output_dir, where nothing is ever overwritten",
}
"""Names of values that nobody sets, because they follow from others."""

NOT_YET = {
    "use_dora": "DoRA",
    "peft_use_dora": "DoRA",
    "loraplus_lr_ratio": "another learning rate for B (LoRA+)",
    "loraplus_lr_embedding": "another learning rate for B (LoRA+)",
    "neftune_noise_alpha": "noise on embeddings (NEFTune)",
    "label_smoothing": "label smoothing",
    "label_smoothing_factor": "label smoothing",
    "val_set_size": "splitting data (name another file in data.eval)",
    "split_dataset_ratio": "splitting data (name another file in data.eval)",
    "special_tokens": "new tokens (add them to the model's files first)",
    "new_special_tokens": "new tokens (add them to the model's files first)",
    "ref_model": "a reference other than the model before its first step",
    "loss_type": "a preference loss other than those that objective.name names",
    "galore_rank": "GaLore",
    "use_liger_kernel": "fused losses of Liger",
    "cpu_offload": "offloading to host memory",
    "fsdp_offload_params": "offloading to host memory",
}
"""Names of what others have and expertmesh does not."""


# More would not be read, and each takes a search through all keys.
_MOST_PROBLEMS = 20
_LONGEST_KEY = 100
_TYPES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text", "null": "null"}
_LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


def explain(
    error: ValidationError, root: type[BaseModel], prefix: Path = (), where: Callable[[Path], str] = lambda path: ""
) -> InputError:
    """Return the error to raise instead, with one line per problem of `error`, which arose in validating `root`.

    `prefix` stands before every key; `where` gives the text before a problem ("file:line: ") by its path. The first
    problem gives the error its key.
    """
    schema = _Schema(root, prefix)
    lines: list[str] = []
    explained: set[Path] = set()
    problems = error.errors(include_url=False)
    for problem in problems:
        if len(lines) >= _MOST_PROBLEMS:
            lines.append(f"{where(())}{len(problems):,} problems in all")
            break
        path = schema.path_of(problem["loc"])
        if path in explained:  # a union complains once per member
            continue
        for named, sentence in schema.sentences(problem, path):
            explained.add(path)
            lines.append(f"{where(named)}{sentence}")
    return InputError("\n".join(lines), key=schema.key_of(problems[0]))


@cache
def _json_schema(root: type[BaseModel]) -> dict[str, Any]:
    return root.model_json_schema()


class _Schema:
    """The keys below `root` and what each accepts. A node is a part of the JSON schema; {} is what is not known."""

    def __init__(self, root: type[BaseModel], prefix: Path) -> None:
        self._schema = _json_schema(root)
        self._prefix = prefix

    def path_of(self, loc: Path) -> Path:
        """Return the path of the value that pydantic's `loc` is about.

        A location goes on behind the value with the names of the union members that were tried.
        """
        return next((loc[:depth] for depth in range(len(loc)) if not self._inside(self._at(loc[:depth]))), loc)

    def key_of(self, problem: ErrorDetails) -> str:
        match problem["type"]:
            case "extra_forbidden":
                return "config.unknown-key"
            case "missing":
                return "config.missing-key"
            case "value_error" if "properties" in self._at(self.path_of(problem["loc"])):
                return "config.combination"
        return "config.wrong-value"

    def sentences(self, problem: ErrorDetails, path: Path) -> Iterator[tuple[Path, str]]:
        """Yield the path and the sentence of every problem that one of pydantic's errors, about `path`, stands for."""
        key = dotted((*self._prefix, *path)) or "the configuration"
        value, node = problem["input"], self._at(path)
        match problem["type"]:
            case "extra_forbidden":
                yield path, f"{key} is not a key of the configuration; {self._advice(path)}"
            case "missing":
                for name in node.get("required", [()]) if "properties" in node else [()]:
                    missing = (*path, name) if name else path
                    yield missing, f"{dotted((*self._prefix, *missing))} is missing; add it"
            case "too_short" if len(value) >= problem["ctx"]["min_length"]:
                return  # items of a list were refused, and pydantic counts what is left
            case "value_error" if "properties" in node:  # its sentences name their keys in full
                for sentence in str(problem["ctx"]["error"]).splitlines():
                    named = sentence.split(maxsplit=1)[0].rstrip(",")
                    yield tuple(named.split(".")), sentence
            case "value_error":
                yield path, f"{key} is {show(value)}, but {problem['ctx']['error']}"
            case "string_type" if isinstance(value, int | float):
                yield path, f"{key} must be {self._accepts(node)}, not the number {show(value)}; put it in quotes"
            case _:
                too_large = problem["type"] == "less_than_equal"
                yield path, f"{key} must be {self._accepts(node, too_large)}, not {show(value)}"

    def _resolved(self, node: dict[str, Any]) -> dict[str, Any]:
        """Return the node that a reference leads to; of alternatives the section, else the first list."""
        options = [self._resolved(option) for option in node.get("anyOf", [])]
        wanted = [option for option in options if "properties" in option] or [o for o in options[:1] if "items" in o]
        if wanted:
            return wanted[0]
        return self._schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def _inside(self, node: dict[str, Any]) -> dict[str | int, Any]:
        """Return the nodes inside a section (by key) or a list (by position; only 0 if all items are equal)."""
        if "properties" in node:
            return dict(node["properties"])
        return dict(enumerate(node.get("prefixItems", [node["items"]] if "items" in node else [])))

    def _at(self, path: Path) -> dict[str, Any]:
        node = self._schema
        for part in path:
            members = self._inside(node)
            is_any_item = isinstance(part, int) and len(members) == 1
            node = self._resolved(members.get(0 if is_any_item else part, {}))
        return node

    def _accepts(self, node: dict[str, Any], too_large: bool = False) -> str:
        """Return what a node accepts, in words: "an integer of at least 1 or null". The most that is let through, far
        beyond what makes sense, is said where it is exceeded.
        """
        match node:
            case {"anyOf": options}:
                return " or ".join(self._accepts(option, too_large) for option in options)
            case {"$ref": _}:
                return self._accepts(self._resolved(node), too_large)
            case {"const": value}:
                return str(value)
            case {"enum": choices}:
                return f"one of {', '.join(map(str, choices))}"
            case {"properties": keys}:
                return f"a section of keys ({', '.join(keys)})"
            case {"prefixItems": items}:
                return f"a list of {len(items)} values, each {self._accepts(items[0])}"
            case {"items": item}:
                return f"a list of {'one or more' if 'minItems' in node else 'any'} items, each {self._accepts(item)}"
            case {"additionalProperties": True}:
                return "keys and values of your own"
            case {"additionalProperties": value}:
                return f"keys of your own, each {self._accepts(value)}"
        named = [name for name in _LIMITS if name in node and (name != "maximum" or too_large or node[name] <= 1)]
        shown = {name: f"{node[name]:,}" if isinstance(node[name], int) else f"{node[name]:g}" for name in named}
        limits = " and ".join(f"{_LIMITS[name]} {shown[name]}" for name in named)
        limits = "that is not empty" if "minLength" in node else limits
        return f"{_TYPES[node['type']]} {limits}".rstrip()

    def _advice(self, path: Path) -> str:
        """Return what to do about the unknown key at `path`."""
        key = str(path[-1])[:_LONGEST_KEY]
        theirs = key.replace("-", "_")
        if theirs in DERIVED:
            return f"it follows from {DERIVED[theirs]}; remove it"
        keys = list(self._all_keys(self._schema))
        homes = [dotted((*self._prefix, *known[:-1])) for known in keys if known[-1] == key]
        if homes:
            return f"it belongs {' or '.join(f'under {home}' if home else 'at the top level' for home in homes)}"
        if theirs in ELSEWHERE:
            return f"did you mean {ELSEWHERE[theirs]}?"
        if theirs in NOT_YET:
            return f"{NOT_YET[theirs]} is not in expertmesh yet; remove it"
        siblings = [str(sibling) for sibling in self._inside(self._at(path[:-1]))]
        if near := difflib.get_close_matches(key, siblings, n=1):
            return f"did you mean {dotted((*self._prefix, *path[:-1], near[0]))}?"
        by_name = {str(known[-1]): known for known in reversed(keys)}
        if near := difflib.get_close_matches(key, by_name, n=1, cutoff=0.75):
            return f"did you mean {dotted((*self._prefix, *by_name[near[0]]))}?"
        return f"the keys here are {', '.join(siblings)}"

    def _all_keys(self, node: dict[str, Any], path: Path = ()) -> Iterator[Path]:
        for part, member in self._inside(self._resolved(node)).items():
            if isinstance(part, str):
                yield (*path, part)
            yield from self._all_keys(member, (*path, part))


def close_to(name: str, known: Sequence[str]) -> str:
    """Return what to do about a name that is none of those known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"


def show(value: object) -> str:
    """Return a value as its author knows it from YAML; text in quotes, so that '10' and 10 look different."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | BaseModel):
        return "a section of keys"
    items = value if isinstance(value, list | tuple) else None
    text = repr(value) if items is None else f"[{', '.join(show(item) for item in items[:40])}]"
    return text if len(text) <= 80 else f"{text[:76]} ..."
