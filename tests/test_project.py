"""What a stranger meets first is true: links, the reference of names, claimed versions, workflows, issue forms."""

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import expertmesh

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("benchmarks/*.md")]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere_on_github(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name}: {missing}"


def test_a_list_follows_an_empty_line_or_the_site_shows_no_list() -> None:
    # Python-Markdown, unlike GitHub, takes such lines for the paragraph or the code before them.
    directly = re.compile(r"^(?![-\s]|\d+\.).+\n(- |\d+\. ).*", re.MULTILINE)
    for page in ROOT.glob("docs/*.md"):
        found = directly.search(FENCED.sub("code", page.read_text(encoding="utf-8")))
        assert found is None, f"{page.name}: {found[0]}"


def test_every_public_name_is_in_the_reference() -> None:
    described = set(re.findall(r"^::: expertmesh\.(\w+)$", (ROOT / "docs/python.md").read_text(), re.MULTILINE))
    assert described == set(expertmesh.__all__) - {"__version__"}


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(_leaves(navigation)) == sorted(page.name for page in ROOT.glob("docs/*.md"))


def test_pages_have_the_keys_options_and_examples_of_the_code() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    pages = {page.name: page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md")}
    marked = {name for name, text in pages.items() if tables["MARKED"].search(text)}
    assert marked == {"cli.md", "configuration.md", "recipes.md"}
    assert [name for name in marked if tables["current"](pages[name]) != pages[name]] == [], "make schema"
    changed = pages["configuration.md"].replace("| `output_dir` |", "| `output` |")
    assert tables["current"](changed) == pages["configuration.md"]


def _leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [leaf for inner in (entry.values() if isinstance(entry, dict) else entry) for leaf in _leaves(inner)]


def test_the_lowest_versions_are_those_that_the_project_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = {re.match(r"[\w-]+", text)[0]: re.search(r">=([\d.]+)", text)[1] for text in project["dependencies"]}
    lines = (ROOT / "constraints/oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    padded = {name: re.sub(r"(\.0)+$", "", version) for name, version in oldest.items()}
    assert padded == {name: re.sub(r"(\.0)+$", "", version) for name, version in claimed.items()}


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
        commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
        assert set(re.findall(r"\bmake ([\w-]+)", "\n".join(commands))) <= targets
        assert all(job["timeout-minutes"] for job in jobs)


def test_issue_forms_are_what_github_reads() -> None:
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        content = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(content)
        asked = [part for part in content["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in asked}) == len(asked)
        assert all(part["attributes"]["label"] for part in asked)


def test_source_files_that_pages_name_exist() -> None:
    roots = (ROOT, ROOT / "src/expertmesh")
    for page in PAGES:
        named = re.findall(r"`(?:src/expertmesh/)?((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8"))
        missing = [name for name in named if not any((root / name).is_file() for root in roots)]
        assert not missing, f"{page.relative_to(ROOT)}: {missing}"
