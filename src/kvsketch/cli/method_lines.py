"""What each method does, in one line: the list of `kvsketch methods`."""

from __future__ import annotations

#: the method that ``SketchCache`` and the commands use unless another is named
DEFAULT = "heavy_merge"
#: groups of methods, each with a line for every method
GROUPS: dict[str, dict[str, str]] = {
    "Merge tokens": {
        "heavy_merge": "most attended tokens unchanged, the others merged",
        "cluster_merge": "the most similar tokens merged; looks at no queries",
        "d2o": "H2O's tokens; others merged into the most similar one",
        "cam": "H2O's tokens; others' values added to later ones",
    },
    "Keep tokens by the attention of queries": {
        "h2o": "largest sum of attention so far",
        "observed_attention": "largest mean attention so far",
        "snapkv": "most attended by the last queries, smoothed",
        "pyramidkv": "SnapKV, with larger budgets for the first layers",
        "chunkkv": "SnapKV, in chunks of successive tokens",
        "criticalkv": "SnapKV, and how much values add to the output",
        "tova": "most attended by the newest query, in all heads",
        "rkv": "most attended by the last queries, least repeated later",
        "triattention": "most attended by the mean query from later positions",
        "expected_attention": "largest expected contribution to later outputs",
        "compactor": "attention within blocks, and keys unlike the others",
    },
    "Keep tokens without queries": {
        "streaming_llm": "the first and the last tokens only",
        "uniform": "a uniform sample, weighted without bias",
        "knorm": "keys of the smallest norm",
        "keydiff": "keys least similar to the mean key",
        "lagkv": "tokens that differ most from those that follow",
        "kcenter": "centers of a greedy k-center clustering of the keys",
    },
    "Halve the tokens, and double the mass of those that are kept": {
        "balancekv": "BalanceKV's random balancing, in blocks",
        "kernel_halving": "random balancing of pairs, after kernel thinning",
        "greedy_halving": "of each pair the token that balances better",
    },
    "Streaming sketches, whose whole state is bounded": {
        "subgen": "SubGen (ClusterGen), Algorithm 1",
        "subgen_coupled": "SubGen with one set of samples for both sums",
        "merge_reduce": "BalanceKV, Algorithm 3, over any of the halvings",
        "balancekv_streaming": "BalanceKV, Algorithm 1",
        "sliding_window": "the last tokens, and one slot for all before",
        "sliding_window_sampled": "the last tokens, and a sample of those before",
        "one_dimensional": "largest and smallest keys, for heads of one channel",
    },
    "Keep tokens by a second reading of the context (kvsketch.prefill)": {
        "kvzip": "most attended when the context is read again",
        "kvzip_plus": "KVzip, weighted by what values add to the output",
        "kvgrad": "KVzip, by gradients of the last hidden states",
    },
}
LINES = {name: line for group in GROUPS.values() for name, line in group.items()}
