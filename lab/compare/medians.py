"""Reads the reports of `bench trace`, a line each, and prints each policy's runs and medians."""

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
    "requests": "completed",
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
    ours = medians.pop("warmroute", None)
    if not ours or not medians:
        return
    failed = False
    for column, most in (("ttft_mean_s", 0.65), ("ttft_p99_s", 1)):
        best = min(medians, key=lambda policy: medians[policy][column])
        ratio = ours[column] / medians[best][column]
        failed |= ratio > most
        print(f"warmroute: {COLUMNS[column]} {ratio:.2f} of {best}'s, the best other (at most {most})")
    lost = sum(r["lost"] for r in runs["warmroute"])
    print(f"warmroute: {lost} lost in all (none)")
    sys.exit(1 if failed or lost else 0)


main()
