"""`expertmesh report RUN [--output FILE]`: one HTML page about a run, to read, to print or to send.

For a run that is finished, stopped, killed or still going on. Reads the run's directory and writes one file; needs no
accelerator, no network and no model.
"""

from importlib.util import find_spec
from pathlib import Path

from expertmesh.config.errors import InputError
from expertmesh.io.terminal import tell

PAGE = "report.html"


def run(path: str, output: str | None = None) -> int:
    """Write the report of the run at `path` to `output`, or to report.html in it; returns 0.

    Raises `InputError` without matplotlib, without a run, and for a file that cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise InputError(
            "expertmesh report draws with matplotlib, which is not installed; pip install 'expertmesh[report]'",
            key="report.no-matplotlib",
        )
    from expertmesh.report.page import render, write
    from expertmesh.report.run import read_run

    found = read_run(Path(path))
    page = Path(output) if output is not None else Path(path) / PAGE
    write(page, content := render(found))
    total = f" of {found.total_steps:,}" if found.total_steps is not None else ""
    tell(f"report      {page}, {len(content.encode()) / 1024:,.0f} KiB; open it in a browser")
    tell(f"            {found.state}, step {found.last_step:,}{total}, {len(found.metrics.step):,} steps reported")
    for note in found.notes:
        tell(f"            {note}")
    return 0
