"""One self-contained HTML page about a run: what it learned, how its experts were used, what it cost, what is proven.

run.py reads a run's directory, plots.py draws, page.html.j2 lays out, page.py fills it in. Nothing here
starts a process group or changes a run; matplotlib is needed and checked for by the command line.
"""
