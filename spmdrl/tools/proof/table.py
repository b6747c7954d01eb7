"""The records of many families as one Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spmdrl.check.proved_models import Line, Record

_COLUMNS = {
    "trainer": "packed = single = plain",
    "gradients": "gradients",
    "tp": "tp 2",
    "cp": "cp 2",
    "ep": "ep 2",
    "resume": "resume on dp 2",
    "LoRA": "LoRA",
    "vLLM": "vllm engine",
    "transformers": "transformers engine",
    "export": "export",
}
"""{column: name of the line}."""
BEGIN = "<!-- by python -m spmdrl check --families all --table docs/models.md -->\n"
END = "<!-- end -->\n"
_MAX_REASON_CHARS = 280


def page_with(records: Sequence[Record], page: str) -> str:
    """Return a Markdown page in which the table of records replaces the old table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + _text(records) + END + rest.partition(END)[2]


def write(records: Sequence[Record], path: Path) -> None:
    """Write the table into a page. Create the page if it does not exist."""
    page = path.read_text() if path.is_file() else "# Models\n\n"
    path.write_text(page_with(records, page))


def _text(records: Sequence[Record]) -> str:
    reasons: list[str] = []
    rows = [_row(record, reasons) for record in records]
    head = ["family", *_COLUMNS, "date"]
    lines = [head, ["---"] * len(head), *rows]
    table = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    notes = "".join(f"{i}. {reason}\n" for i, reason in enumerate(reasons, 1))
    used = {", ".join(f"{n} {v}" for n, v in record.versions.items()) for record in records}
    return f"\nWith {'; or '.join(sorted(used))}.\n\n{table}\n{notes}\n"


def _row(record: Record, reasons: list[str]) -> list[str]:
    lines = {line.name: line for line in record.lines}
    whole = lines.get("model")
    if whole is not None and whole.verdict != "proved":
        cells = [_cell(whole, reasons)] + [""] * (len(_COLUMNS) - 1)
    else:
        cells = [_cell(lines[name], reasons) if name in lines else "" for name in _COLUMNS.values()]
    return [f"`{record.model}`", *cells, record.date]


def _cell(line: Line, reasons: list[str]) -> str:
    """Return a verdict; if it is not `proved`, with the number of its reason below the table."""
    if line.verdict == "proved":
        return line.kind or "proved"
    if "which has no experts" in line.note:
        return "-"
    text = line.note.split(" (model.path ")[0].removeprefix("model.path ").strip()
    text = " ".join(word for word in text.split() if not word.startswith("/"))
    is_long = len(text) > _MAX_REASON_CHARS
    reason = f"{line.name}: {text[:_MAX_REASON_CHARS]}{' ...' if is_long else ''}"
    if reason not in reasons:
        reasons.append(reason)
    return f"{line.verdict} ({reasons.index(reason) + 1})"
