"""Writes the tables of docs/documents.md from the JSON that two benchmarks left in docs/results/.

python -m benchmarks.page_documents
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.markdown import made_with, table
from benchmarks.page import DOCS


def merged(result: dict[str, Any]) -> str:
    """Merged documents, compared with the same text read as one."""
    rows = [
        [
            str(row["budget"]),
            row["way"],
            f"{row['accuracy']:.2f}",
            f"{row['divergence']:.1e}",
            f"{row['kv_bytes'] / 1e6:.2f} MB",
        ]
        for row in result["results"]
    ]
    header = ["kept", "the two halves", "accuracy", "KL to the exact cache", "bytes of all records"]
    return (
        f"{table(header, rows)}\n\n"
        f"`python -m benchmarks.document_merge`: {result['records']} LongEval records, each cut in "
        f"two between lines, {result['asked']} questions about each, on `longeval-one-head` with "
        f"`{result['method']}` (kept 1.0: all tokens in 16 bits). together: read as one document; "
        "appended: the second half read after the compressed first; merged: both halves read and "
        "compressed separately, then merged. KL: of the number's first token, in nats. "
        f"{made_with(result)}"
    )


def files(result: dict[str, Any]) -> str:
    """Files of documents, compared with their predicted size and with reading the text again."""
    rows = [
        [
            f"{row['tokens']:,}",
            f"{row['right']} of {row['asked']}",
            "yes" if row["same_in_a_new_process"] else "no",
            f"{row['file_over_exact']:.3f}",
            f"{row['file_over_predicted']:.3f}",
            f"{row['read_over_load_to_first_token']:.0f}",
        ]
        for row in result["results"]
    ]
    header = [
        *("tokens", "right", "the same in a new process", "file / exact cache"),
        *("file / predicted", "time to the first token, read / loaded"),
    ]
    return (
        f"{table(header, rows)}\n\n"
        "`python -m benchmarks.document_files`: LongEval records "
        f"({result['cases'].removesuffix('.jsonl').replace('_', ' ')}) at a budget of "
        f"{result['budget']}, on `longeval-one-head`. The last column is the ratio of the median "
        "times in one run. A larger model takes longer to read a document, and its file longer to "
        "load. "
        f"{made_with(result)}"
    )


def main() -> None:
    """Replace the tables between the marks."""
    path = DOCS / "documents.md"
    text = path.read_text(encoding="utf-8")
    for name, write in (("merge", merged), ("files", files)):
        result = json.loads((DOCS / "results" / f"document_{name}.json").read_text("utf-8"))
        marks = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        inside = marks[0] + write(result) + "\n" + marks[1]
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        text = re.sub(pattern, lambda _, new=inside: new, text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
