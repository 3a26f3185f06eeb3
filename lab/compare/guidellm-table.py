"""Prints what guidellm or vllm bench reported, from the reports that runs.jsonl in a folder names.

Times are in seconds of the replicas. Each figure is the mean over seeds. Exits with 1 when
warmroute misses a target.
"""

import json
import pathlib
import statistics
import sys

COLUMNS = ["TTFT mean", "TTFT p99", "E2E mean", "E2E p99", "completed", "failed", "unreported", "offered", "late", "CPU"]
RATIOS = COLUMNS[:4]
# The most that a figure of warmroute may be of the best rival's, by load.
TARGETS = {
    0.7: {"TTFT mean": 1.0, "TTFT p99": 1.05, "E2E mean": 0.97, "E2E p99": 1.05},
    0.9: {"TTFT mean": 0.95, "TTFT p99": 1.05, "E2E mean": 0.97, "E2E p99": 1.05},
}


def guidellm_figures(report):
    """Return the figures of a report of guidellm, times in seconds, and the prompt and output tokens of all requests.

    late is the mean time from when a request should have been sent to when it was. unreported are requests that guidellm
    created and counts neither as completed nor as failed; it has been seen to end before it counted its last request.
    """
    benchmark = report["benchmarks"][0]
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    ttft, e2e = metrics["time_to_first_token_ms"]["successful"], metrics["request_latency"]["successful"]
    return {
        "TTFT mean": ttft["mean"] / 1000,
        "TTFT p99": ttft["percentiles"]["p99"] / 1000,
        "E2E mean": e2e["mean"],
        "E2E p99": e2e["percentiles"]["p99"],
        "completed": totals["successful"],
        "failed": totals["errored"] + totals["incomplete"],
        "unreported": benchmark["scheduler_state"]["created_requests"] - totals["total"],
        "late": benchmark["scheduler_metrics"]["request_targeted_start_delay_avg"],
    }, (metrics["prompt_token_count"]["successful"]["total_sum"], metrics["output_token_count"]["successful"]["total_sum"])


def vllm_bench_figures(report):
    """Like guidellm_figures for a report of vllm bench, which does not say how late requests were."""
    return {
        "TTFT mean": report["mean_ttft_ms"] / 1000,
        "TTFT p99": report["p99_ttft_ms"] / 1000,
        "E2E mean": report["mean_e2el_ms"] / 1000,
        "E2E p99": report["p99_e2el_ms"] / 1000,
        "completed": report["completed"],
        "failed": report["failed"],
        "unreported": 0,
        "late": float("nan"),
    }, (report["total_input_tokens"], report["total_output_tokens"])


def offered_load(run, prompt_tokens, output_tokens, requests):
    """Return the time that the requests take on a replica without a cache, as replay counts it, over the replicas' time."""
    if not run["span_s"] or not requests:
        return float("nan")
    context = (prompt_tokens + output_tokens / 2) / requests
    seconds = prompt_tokens / 44000 + output_tokens * (5e-6 + 22e-9 * context)
    return seconds / (run["span_s"] * run["speed"] * run["backends"])


def read_run(folder, run):
    read = {"guidellm": guidellm_figures, "vllm-bench": vllm_bench_figures}[run["tool"]]
    figures, tokens = read(json.loads((folder / run["report"]).read_text()))
    for column in RATIOS + ["late"]:
        figures[column] *= run["speed"]
    return figures | {
        "offered": offered_load(run, *tokens, figures["completed"]),
        "CPU": (run["user_s"] + run["system_s"]) / run["wall_s"],
    }


def means(runs):
    """Return the mean of each figure, but the sum of failed and unreported requests: a mean would hide one."""
    return {c: (sum if c in ("failed", "unreported") else statistics.fmean)(run[c] for run in runs) for c in COLUMNS}


def line(cells, figures):
    return f"{cells:38}" + "".join(f"{figures[c]:>11g}" if c in ("completed", "failed", "unreported") else f"{figures[c]:>11.3f}" for c in COLUMNS)


def check_targets(load, ours, rivals):
    """Print each figure of warmroute over the best rival's and return whether all targets of the load are met."""
    met = ours["failed"] == 0
    print(f"    {'ok  ' if met else 'MISS'} {ours['failed']} failed (none)")
    for column in RATIOS:
        best = min(rivals, key=lambda name: rivals[name][column])
        ratio, most = ours[column] / rivals[best][column], TARGETS.get(load, {}).get(column)
        verdict = "    " if most is None else "ok  " if ratio <= most else "MISS"
        print(f"    {verdict} {column} {ratio:.3f} of {best}'s" + (f" (at most {most})" if most else ""))
        met &= most is None or ratio <= most
    return met


def main():
    folder = pathlib.Path(sys.argv[1])
    runs = {}
    print(f"{'load, router, seed':38}" + "".join(f"{c:>11}" for c in COLUMNS))
    for text in (folder / "runs.jsonl").read_text().splitlines():
        run = json.loads(text)
        figures = read_run(folder, run)
        print(line(f"{run['tool']} {run['load']} {run['name']} {run['seed']}", figures))
        runs.setdefault(run["load"], {}).setdefault(run["name"], []).append(figures)
    met = True
    for load, by_name in sorted(runs.items()):
        rows = {name: means(each) for name, each in by_name.items()}
        for name, row in rows.items():
            print(line(f"load {load} {name}, {len(by_name[name])} seeds", row))
        rivals = {name: row for name, row in rows.items() if name != "warmroute"}
        if "warmroute" in rows and rivals:
            met &= check_targets(load, rows["warmroute"], rivals)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
