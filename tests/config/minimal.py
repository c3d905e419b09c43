"""The shortest configuration that is valid, as YAML text and on disk, for the tests of this directory."""

from pathlib import Path

MINIMAL = """\
model: {name_or_path: some/model}
data:
  train: [{path: train.jsonl}]
output_dir: runs/test
"""


def write(directory: Path, text: str = "", base: str = MINIMAL) -> Path:
    """A file `run.yaml` in `directory`: `base` (lines 1 to 4) followed by `text`."""
    path = directory / "run.yaml"
    path.write_text(base + text, encoding="utf-8")
    return path
