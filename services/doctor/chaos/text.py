"""The report as text."""

from services.doctor.chaos.report import Report, Spread


def describe(report: Report) -> str:
    """Some twenty lines; the last ones are the breaches, or say that there are none."""
    requests = ", ".join(f"{number} {fate}" for fate, number in report.requests.items())
    lines = [
        f"chaos: seed {report.seed}, {report.minutes:g} minutes, {report.tokens_per_s:.0f} tokens/s",
        f"requests: {requests}; {report.completed_share:.2%} of those that had to complete did",
        *(f"  {number} x {error}" for error, number in report.errors.items()),
        f"faults: {report.armed['hit']} of {report.armed['armed']} that were armed struck at their moment",
        *(f"  {kind:14} {sum(variants.values()):4}  {_counts(variants)}" for kind, variants in report.faults.items()),
        *(f"  {kind:14} left out" for kind in report.left_out),
        f"paths: {_counts(report.paths)}; tried: {_counts(report.tries)}; {report.num_retries} retries spent",
        f"because of {_counts(report.reasons) or 'nothing'}",
        f"tokens: {_counts(report.tokens)}",
        "next token of a stream that a fault hit:",
        *(f"  {kind:14} {_seconds(spread)}" for kind, spread in report.stream_recovery.items()),
        f"all ranks serving after a fault: {_seconds(report.rank_recovery)}; after its end: {_seconds(report.rank_recovery_after_release)}",
        f"pause of a move: {_seconds(report.move_pause)}",
        f"all pages back {report.settle_s:.1f} s after the last stream; no rank of some pool serving for {report.unserved_s:.1f} s",
        *(f"BREACH: {sentence}" for sentence in report.breaches),
    ]
    return "\n".join(lines if report.breaches else [*lines, "no breach"])


def _counts(table: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in table.items())


def _seconds(spread: Spread) -> str:
    if not spread.number:
        return "never happened"
    return f"median {spread.median:.2f} s, p99 {spread.p99:.2f} s, most {spread.most:.2f} s ({spread.number} times)"
