"""The documents: tests, files, links, mutants and counts that they name are there."""

import ast
import functools
import re
from pathlib import Path

import pytest

from kvjax.delivery.ring import RingStats
from kvjax.delivery.timeline import COMPUTE, TRANSFER

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "WORKSPACE.md", *sorted(DOCS.glob("*.md"))]
NUM_RULES = 146
STATUSES = {"held", "superseded", "to come", "n/a"}
NAMED_TEST = re.compile(r"(tests/\w+\.py)::(\w+)(?:\[(\w+)\])?")
NAMED_FILE = re.compile(r"`((?:ops|kvjax|tests|experiments)/[a-z0-9_/]+\.\w+)`")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def each_page():
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@functools.cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def has_test(path: str, name: str, case: str) -> bool:
    """Whether a file defines a test; of a case, whether its name is a string there."""
    if not (ROOT / path).exists():
        return False
    tests = {f.name for f in parsed(path).body if isinstance(f, ast.FunctionDef)}
    strings = {c.value for c in ast.walk(parsed(path)) if isinstance(c, ast.Constant)}
    return name.startswith("test_") and name in tests and (not case or case in strings)


def rules() -> list[list[str]]:
    """(number, rule, status, how) of each row."""
    lines = (DOCS / "rules.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def first_column(page: str) -> list[str]:
    """What stands in backticks at the start of a table's rows."""
    return re.findall(r"^\| `(\w+)` \|", (DOCS / page).read_text(), re.M)


@each_page()
def test_every_named_test_exists(page):
    named = NAMED_TEST.findall(page.read_text())
    assert [test for test in named if not has_test(*test)] == []


def test_a_test_that_is_not_there_is_noticed():
    path, name = "tests/test_driver.py", "test_a_broken_ring_is_found"
    assert has_test(path, name, "") and has_test(path, name, "margin_of_one")
    assert not has_test(path, name, "no_such_case")
    assert not has_test(path, "test_no_such_name", "")
    assert not has_test(path, "play", "")
    assert not has_test("tests/test_nothing.py", name, "")


@each_page()
def test_every_named_file_exists(page):
    named = NAMED_FILE.findall(page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@each_page()
def test_every_relative_link_resolves(page):
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose)]
    relative = [link for link in links if link and "://" not in link]
    assert [link for link in relative if not (page.parent / link).exists()] == []


def test_every_rule_has_one_row_and_a_status():
    assert [int(row[0]) for row in rules()] == list(range(1, NUM_RULES + 1))
    assert {len(row) for row in rules()} == {4}
    assert {row[2] for row in rules()} == STATUSES


def test_a_rule_that_is_held_names_its_test_and_one_to_come_what_is_missing():
    for number, _, status, how in rules():
        assert status != "held" or NAMED_TEST.search(how), number
        assert status != "to come" or how, number


def test_every_change_that_breaks_the_ring_is_explained():
    (mutants,) = [
        statement.value
        for statement in parsed("tests/test_driver.py").body
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "MUTANTS"
    ]
    names = [key.value for key in mutants.keys]
    cases = re.findall(r"\| `(\w+)` \|$", (DOCS / "delivery.md").read_text(), re.M)
    assert sorted(cases) == sorted(names)


def test_every_count_is_explained_in_order():
    explained = first_column("delivery.md")
    counts = [name for name in explained if name in RingStats._fields]
    assert counts == [*RingStats._fields]


def test_every_kind_of_mark_is_explained_in_order():
    kinds = (*TRANSFER, *COMPUTE)
    explained = first_column("delivery.md")
    assert [name for name in explained if name in kinds] == [*kinds]


def test_the_example_of_a_model_runs_as_written(capsys):
    (source,) = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "model.md").read_text(), re.M | re.S
    )
    exec(compile(source, "model.md", "exec"), {"__name__": "example"})
    lengths, early_bytes = capsys.readouterr().out.rsplit(maxsplit=1)
    assert lengths == "[208]"
    # Steps begin with 200 to 207 cells, 128 of them on the device; 256 bytes a cell.
    assert int(early_bytes) == sum(range(72, 80)) * 256
