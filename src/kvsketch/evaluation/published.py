"""The papers' own numbers, to be put beside ours where the task is the same."""

from __future__ import annotations

from typing import Any

#: LongEval line retrieval, 50 cases a length, question seen
SUBGEN_TABLE_1: dict[str, Any] = {
    "source": "Zandieh, Han, Mirrokni, Karbasi: SubGen, arXiv:2402.06082, Table 1",
    "model": "longchat-7b-v1.5-32k",
    "cases": 50,
    # lines -> method -> (cache in GB, accuracy); kcenter is the paper's SubGen
    "results": {
        "200": {
            "exact": [2.351, 0.98],
            "streaming_llm": [1.511, 0.56],
            "h2o": [1.511, 0.66],
            "kcenter": [1.512, 0.86],
        },
        "300": {
            "exact": [3.488, 1.0],
            "streaming_llm": [2.012, 0.56],
            "h2o": [2.012, 0.58],
            "kcenter": [2.012, 0.66],
        },
        "400": {
            "exact": [4.613, 0.68],
            "streaming_llm": [2.262, 0.38],
            "h2o": [2.262, 0.38],
            "kcenter": [2.262, 0.44],
        },
    },
}
