"""Publish a result: write its model card (README.md), and push it for `save.push_to_hub`.

The card has the recipe, the figures and the findings of `verify`, and no path of this machine. The push comes last, by
rank 0 alone: when it fails, the run is finished and its result is in output_dir.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.safetensors_writer import replace_synced
from expertmesh.io.terminal import plural
from expertmesh.training.resume import flat
from expertmesh.training.startup.output_dir import ADAPTER, MODEL

log = logging.getLogger(__name__)
CARD = "README.md"
# Of the configuration, what decides what was trained; paths are left to `_name`.
_RECIPE = (
    "objective", "optim", "schedule", "lora", "precision.params", "precision.compute", "precision.frozen",
    "data.max_length", "data.packing", "data.loss_on", "train.global_batch_size", "train.num_epochs", "train.max_steps",
    "train.seed", "moe.router", "moe.aux_loss_coef", "moe.z_loss_coef", "moe.bias_update_rate",
)  # fmt: skip


def check_hub(config: Config) -> None:
    """Refuse `save.push_to_hub` without a log-in. Every rank calls it before weights are read; one small all-reduce."""
    with raise_on_all_ranks("asking the hub"):
        if config.save.push_to_hub is not None and dist.get_rank() == 0:
            from huggingface_hub import HfApi

            try:
                HfApi().whoami()
            except Exception as error:
                raise InputError(
                    f"save.push_to_hub {config.save.push_to_hub}: the hub does not know who asks "
                    f"({_first_line(error)}); log in (hf auth login, or HF_TOKEN), or set save.push_to_hub to null and "
                    "push later",
                    key="save.hub-refused",
                ) from error


def push_result(config: Config) -> None:
    """Push the result of a finished run, after everything else and without a collective: an upload may take long.

    Raises `InputError` on rank 0 if it fails.
    """
    repository = config.save.push_to_hub
    if repository is None or dist.get_rank() != 0:
        return
    from huggingface_hub import HfApi

    folder = Path(config.output_dir) / (MODEL if config.lora is None else ADAPTER)
    log.info(f"pushing    {folder} to {repository}")
    try:
        HfApi().create_repo(repository, private=config.save.hub_private, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with expertmesh")
    except Exception as error:
        raise InputError(
            f"save.push_to_hub {repository}: {_first_line(error)}; the run is finished and its result is in {folder}: "
            f"push it with hf upload {repository} {folder}",
            key="save.push-failed",
        ) from error
    log.info(f"pushed     https://huggingface.co/{repository}")


def write_card(config: Config, directory: Path) -> None:
    """Write the card into the result in `directory`, in place of one that the adapter's library made. For rank 0."""
    replace_synced(directory / CARD, "\n".join(_card(config)).encode() + b"\n")


def _card(config: Config) -> Iterator[str]:
    base, adapter = config.model.name_or_path, config.lora is not None
    yield "---"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    if not Path(base).exists() and "://" not in base:
        yield f"base_model: {json.dumps(base)}"
    yield f"tags: [expertmesh, mixture-of-experts, {config.objective.name}{', lora' if adapter else ''}]"
    yield "---"
    yield f"\n# {Path(config.save.push_to_hub or Path(config.output_dir).absolute()).name}\n"
    what = "Trained from random weights with the config of" if config.model.from_config else "Fine-tuned from"
    yield (
        f"{'A LoRA adapter for' if adapter else what} `{_name(base)}`, trained with "
        f"[expertmesh](https://github.com/expertmesh/expertmesh) on {_listed(config)}."
    )
    yield "\n## Figures\n"
    yield from (f"- {line}" for line in _figures(Path(config.output_dir)))
    yield f"- {_verified(Path(config.output_dir) / 'verification.json')}"
    yield "\n## Recipe\n\n| key | value |\n|---|---|"
    values = flat(config.model_dump(mode="json"))
    for key, value in values.items():
        if key == "moe.router" and adapter:
            continue  # routers that have no adapters are frozen, whatever it says
        if value is not None and any(key == name or key.startswith(f"{name}.") for name in _RECIPE):
            yield f"| `{key}` | {_name(value) if isinstance(value, str) else json.dumps(value)} |"


def _listed(config: Config) -> str:
    return ", ".join(f"`{_name(source.path)}`" for source in config.data.train)


def _name(path: str) -> str:
    """Return a hub id in full, and of a path on this machine the last part."""
    return Path(path).name if path.startswith((".", "/", "~")) or Path(path).exists() else path


def _figures(output_dir: Path) -> Iterator[str]:
    """Return figures from metrics.jsonl, which this run has written."""
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_bytes().splitlines()]
    steps, evaluations = [row for row in rows if "loss" in row], [row for row in rows if "eval_loss" in row]
    if steps:
        yield f"{plural(steps[-1]['step'], 'step')}, {steps[-1]['epoch']:.2f} passes over the data"
        first, last = (_shown(row["loss"]) for row in (steps[0], steps[-1]))
        yield f"training loss {first} at the first reported step, {last} at the last"
    if evaluations:
        yield f"evaluation loss {_shown(evaluations[-1]['eval_loss'])}"


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "not finite"


def _verified(path: Path) -> str:
    """Return what `expertmesh verify` found for this configuration, if it was run."""
    try:
        found = json.loads(path.read_bytes())
        layers = ", ".join(f"{layer['name']} {layer['status']}" for layer in found["layers"])
        return f"`expertmesh verify` of this configuration against the unsharded model: {found['status']} ({layers})"
    except FileNotFoundError:
        return "not compared with the unsharded model (`expertmesh verify`)"
    except (OSError, ValueError, KeyError, TypeError):
        return "its verification.json cannot be read"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
