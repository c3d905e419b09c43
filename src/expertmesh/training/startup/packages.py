"""Check for optional packages that a configuration needs. Light, so that `train` can refuse before it imports torch."""

import importlib.util

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.io.storage import refuse_url

# Beside the tracker's own; heat maps are pictures.
_MODULES = {
    "tensorboard": ("tensorboard",), "wandb": ("wandb", "PIL"), "trackio": ("trackio",), "mlflow": ("mlflow", "PIL")
}  # fmt: skip
_PACKAGES = {"PIL": "pillow", "mlflow": "mlflow-skinny"}


def refuse_missing_packages(config: Config) -> None:
    """Raise `InputError` for a package that is not installed, with the line that installs it."""
    if config.model.attention == "flash_attention_2" and not _installed("flash_attn"):
        raise InputError(
            "model.attention: flash_attention_2 needs the flash-attn package; install it or use sdpa",
            key="install.missing-package",
        )
    if config.checkpoint.remote is not None:
        refuse_url(config.checkpoint.remote, "checkpoint.remote")
    for tracker in config.log.report_to:
        for module in _MODULES.get(tracker, ()):
            if not _installed(module):
                raise InputError(
                    f"log.report_to: {tracker} needs the {_PACKAGES.get(module, module)} package; pip install "
                    f"'expertmesh[{tracker}]', or leave {tracker} out",
                    key="install.missing-package",
                )


def _installed(module: str) -> bool:
    """Return whether a package is installed, without importing it.

    A directory of that name without code, as trackers leave them, is no package.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
