"""Renders results/kernels.json: the table in kernels/README.md and results/kernels.svg. `python -m tests.bench.kernel_table`.

The tables stand between the two marks of the page, so that no figure there is ever typed by hand.
"""

import html
import json
from pathlib import Path

import msgspec

from tests.bench.report import RESULTS, Row, passed

PAGE = Path(__file__).parents[2] / "kernels" / "README.md"
BEGIN, END = "<!-- begin: tests/bench/kernel_table.py -->", "<!-- end -->"
_BAR, _LEFT, _UNIT = 18, 330, 260  # pixels: height of a bar, room for labels, a ratio of 1
_LONGEST = 2.0  # ratios beyond it are cut off; the figure beside the bar says them


def load() -> tuple[dict[str, object], list[Row]]:
    """The results file without its rows, and its rows."""
    body = json.loads((RESULTS / "kernels.json").read_text())
    return body, [msgspec.convert(row, Row) for row in body.pop("rows")]


def verdict(row: Row) -> str:
    """aim, base, **missed**, or nothing for a row without a bar."""
    if row.base is None:
        return ""
    if not passed(row):
        return "**missed**"
    return "aim" if row.aim is not None and passed(msgspec.structs.replace(row, base=row.aim)) else "base"


def table(rows: list[Row]) -> str:
    """Markdown of rows, in their order."""
    lines = ["| id | measured | base | aim | | conditions |", "| --- | ---: | ---: | ---: | --- | --- |"]
    for row in rows:
        bar, aim = ("" if value is None else f"{value:g}" for value in (row.base, row.aim))
        lines.append(f"| {row.id} | {row.value:.4g} {row.unit} | {bar} | {aim} | {verdict(row)} | {row.conditions} |")
    return "\n".join(lines)


def plot(rows: list[Row]) -> str:
    """SVG: a bar a K9 row, library's time over ours, with lines at 0.9 and 1."""
    shown = sorted((row for row in rows if row.id.startswith("K9-")), key=lambda row: row.value)
    width, height = int(_LEFT + _UNIT * _LONGEST + 70), (_BAR + 4) * len(shown) + 44
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>',
             '<text x="8" y="18">Best library kernel\'s time / ours, same run, one H200 (right of the line: ours is faster)</text>']
    for i, row in enumerate(shown):
        y, colour = 32 + i * (_BAR + 4), "#2a7" if row.value >= 1 else "#da3" if row.value >= 0.9 else "#c44"
        length = _UNIT * min(row.value, _LONGEST)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{html.escape(row.id.removeprefix("K9-"))}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{length:.0f}" height="{_BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + length + 6:.0f}" y="{y + 13}">{row.value:.2f}</text>')
    for ratio, dash in ((0.9, "4 3"), (1.0, "none")):
        x = _LEFT + _UNIT * ratio
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="26" y2="{height - 8}" stroke="black" stroke-dasharray="{dash}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def rewrite(page: str, body: dict[str, object], rows: list[Row]) -> str:
    """`page` with what stands between the marks replaced."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    machine, versions = body["machine"], body["versions"]
    assert isinstance(machine, dict) and isinstance(versions, dict)
    said = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "flashinfer-python", "sgl-deep-gemm") if name in versions)
    caption = f"Measured on {body['date']}: {machine.get('gpu', 'no GPU')}, CUDA {machine.get('cuda', '?')}, {said}."
    against = [row for row in rows if row.id.startswith("K9-")]
    goals = [row for row in rows if row not in against]
    tables = f"{table(goals)}\n\nEvery op against the best library kernel for it:\n\n{table(against)}"
    return f"{head}{BEGIN}\n{caption}\n\n{tables}\n{END}{tail}"


def main() -> None:
    body, rows = load()
    PAGE.write_text(rewrite(PAGE.read_text(), body, rows))
    (RESULTS / "kernels.svg").write_text(plot(rows))
    print(f"wrote {PAGE} and {RESULTS / 'kernels.svg'}")


if __name__ == "__main__":
    main()
