"""The page shows the results file: verdicts, and a page that is already rendered stays as it is."""

from tests.bench.kernel_table import BEGIN, END, PAGE, RESULTS, load, plot, rewrite, table, verdict
from tests.bench.report import Row


def test_verdicts() -> None:
    assert verdict(Row("a", 9, "us", "lower", 10, 8, "")) == "base"
    assert verdict(Row("a", 7, "us", "lower", 10, 8, "")) == "aim"
    assert verdict(Row("a", 0.8, "x", "higher", 0.9, 1.0, "")) == "**missed**"
    assert verdict(Row("a", 9, "us", "lower", None, None, "")) == ""


def test_rows_are_shown_where_the_marks_stand() -> None:
    rows = [Row("K2-M64", 9.1, "us", "lower", 10, 6.5, "cold"), Row("K9-gate", 1.2, "x", "higher", 0.9, 1, "against <cuBLAS>")]
    page = rewrite(f"before {BEGIN} old {END} after", {"machine": {"gpu": "H"}, "versions": {"torch": "2"}, "date": "d"}, rows)
    assert page.startswith("before ") and page.endswith(" after") and " old " not in page
    assert "| K2-M64 | 9.1 us | 10 | 6.5 | base | cold |" in table(rows[:1])
    assert ">gate</text>" in plot(rows)


def test_the_page_shows_the_results_that_are_in_the_tree() -> None:
    body, rows = load()
    assert rewrite(PAGE.read_text(), body, rows) == PAGE.read_text(), "run: python -m tests.bench.kernel_table"
    assert (RESULTS / "kernels.svg").read_text() == plot(rows)
