"""Reads `load --json` reports, a line each, and prints each policy's runs and medians."""

import json
import statistics
import sys

COLUMNS = {
    "hit_ratio": "hit ratio",
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "p50",
    "ttft_p90_s": "p90",
    "ttft_p99_s": "p99",
    "e2e_mean_s": "end to end",
    "requests": "answered",
    "lost": "lost",
}


def line(name, values):
    print(f"{name:28}" + "".join(f"{v:>12}" for v in values))


def figures(run):
    return [f"{run[c]:g}" if c in ("requests", "lost") else f"{run[c]:.3f}" for c in COLUMNS]


def main():
    runs = {}
    for report in sys.stdin:
        for result in json.loads(report)["results"]:
            runs.setdefault(result["policy"], []).append(result)
    line("", COLUMNS.values())
    medians = {}
    for policy, results in runs.items():
        for i, run in enumerate(results, 1):
            line(f"{policy}, round {i}", figures(run))
        medians[policy] = {c: statistics.median(r[c] for r in results) for c in COLUMNS}
    for policy, median in medians.items():
        line(f"{policy}, median", figures(median))
    first, *others = medians
    for policy in others:
        ratio = medians[policy]["ttft_mean_s"] / medians[first]["ttft_mean_s"]
        lost = sum(r["lost"] for r in runs[policy])
        print(f"{policy}: mean TTFT {ratio:.2f} of {first}'s (at most 0.75), {lost} lost in all (none)")
        if ratio > 0.75 or lost:
            sys.exit(1)


main()
