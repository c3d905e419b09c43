"""`expertmesh report RUN ... [--output FILE]`: one HTML page about a run, or one that compares several.

For runs that are finished, stopped, killed or still going on. Reads the runs' directories and writes one file; needs no
accelerator, no network and no model.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from expertmesh.config.errors import InputError
from expertmesh.io.terminal import plural, tell

PAGE = "report.html"
# Letters name the runs.
_MOST = 26


def run(paths: Sequence[str], output: str | None = None) -> int:
    """Write the report to `output`, or to report.html in the only run, or here for several; return 0.

    Raises:
        InputError: matplotlib or a run is missing, or a file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise InputError(
            "expertmesh report draws with matplotlib, which is not installed; pip install 'expertmesh[report]'",
            key="report.no-matplotlib",
        )
    if len(paths) > _MOST:
        raise InputError(f"{len(paths)} runs: a page compares at most {_MOST}; give fewer", key="cli.usage")
    from expertmesh.report.page import render, render_together, write
    from expertmesh.report.run import read_run

    runs = [read_run(Path(path)) for path in paths]
    page = Path(output) if output is not None else Path(PAGE) if len(runs) > 1 else Path(paths[0]) / PAGE
    write(page, content := render_together(runs) if len(runs) > 1 else render(runs[0]))
    tell(f"report      {page}, {len(content.encode()) / 1024:,.0f} KiB; open it in a browser")
    for found in runs:
        which = f"{found.directory}: " if len(runs) > 1 else ""
        total = f" of {found.total_steps:,}" if found.total_steps is not None else ""
        reported = f"{plural(len(found.metrics.step), 'step')} reported"
        tell(f"            {which}{found.state}, step {found.last_step:,}{total}, {reported}")
        if (spent := found.goodput) is not None and spent.wall:
            parts = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in spent.parts().items() if seconds >= 0.5)
            tell(f"            goodput {spent.share:.0%} of {spent.wall:,.0f} s: {parts}")
        for note in found.notes:
            tell(f"            {note}")
    return 0
