"""Reads the reports of `bench agents`, a line each, and prints medians over rounds by API and
contender, each peer with its best policy, and whether warmroute meets its targets. Of recorded
sessions there is a table for each agent and one for all, which has the targets.

The best policy of a peer is the one with the lowest mean TTFT in that table. Exits with
1 when a target is missed.
"""

import json
import math
import statistics
import sys

COLUMNS = {
    "hit ratio": lambda r: r["requests"]["hit_ratio"],
    "of pooled": lambda r: r["requests"]["hit_ratio"] / r.get("pooled_hit_ratio", math.nan),
    "TTFT mean": lambda r: r["requests"]["ttft_mean_s"],
    "p99": lambda r: r["requests"]["ttft_p99_s"],
    "longest": lambda r: r["ttft_longest_mean_s"],
    "end to end": lambda r: r["requests"]["e2e_mean_s"],
    "task, s": lambda r: r["task_mean_s"],
    "load": lambda r: r["load"],
}
# The most that a figure of warmroute may be of the best peer's.
TARGETS = {"TTFT mean": 1.05, "longest": 1.1, "task, s": 1.02}
LEAST_OF_POOLED = 0.97
# Of recorded sessions:
RECORDED_TARGETS = {"TTFT mean": 0.9, "task, s": 1.0}
LEAST_HITS_MORE = -0.005  # than the best peer


def medians(reports):
    row = {title: statistics.median(map(figure, reports)) for title, figure in COLUMNS.items()}
    # A median would hide these.
    return row | {"lost": sum(r["requests"]["lost"] for r in reports), "rounds": len(reports)}


def best_of_each(rows):
    """Return the row of each peer's best policy, by the peer's name."""
    best = {}
    for name, row in rows.items():
        peer = name.partition("=")[0]
        if peer not in best or row["TTFT mean"] < best[peer][1]["TTFT mean"]:
            best[peer] = (name, row)
    return best


def check_targets(ours, peers, recorded):
    """Print each figure beside its target and return whether all are met."""
    if recorded:
        peer, row = max(peers.items(), key=lambda p: p[1]["hit ratio"])
        more = ours["hit ratio"] - row["hit ratio"]
        checks = [(more >= LEAST_HITS_MORE, f"hit ratio {more:+.3f} from {peer}'s (at least {LEAST_HITS_MORE})")]
    else:
        checks = [(ours["of pooled"] >= LEAST_OF_POOLED, f"hit ratio {ours['of pooled']:.3f} of one pooled cache's (at least {LEAST_OF_POOLED})")]
    for title, most in (RECORDED_TARGETS if recorded else TARGETS).items():
        peer, row = min(peers.items(), key=lambda p: p[1][title])
        ratio = ours[title] / row[title]
        checks.append((ratio <= most, f"{title} {ratio:.2f} of {peer}'s (at most {most})"))
    checks.append((ours["lost"] == 0, f"{ours['lost']} lost (none)"))
    for met, what in checks:
        print(f"    {'ok  ' if met else 'MISS'} {what}")
    return all(met for met, _ in checks)


def main():
    apis = {}
    for line in sys.stdin:
        report = json.loads(line)
        table = apis.setdefault((report["api"], report.get("agent")), {})
        table.setdefault(report["name"], []).append(report)
    met = True
    chat = {}
    for (api, agent), runs in apis.items():
        rows = {name: medians(reports) for name, reports in runs.items()}
        if not agent:
            chat = chat or rows
        titles = [title for title in COLUMNS if not (agent and title == "of pooled")]
        print(f"\n{agent or api:40}" + "".join(f"{title:>11}" for title in [*titles, "lost", "rounds"]))
        shown = rows | {f"{name} (over chat)": row for name, row in chat.items() if name not in rows}
        for name, row in shown.items():
            print(f"{name:40}" + "".join(f"{row[title]:>11.3f}" for title in titles) + f"{row['lost']:>11}{row['rounds']:>11}")
        peers = {name: row for name, row in shown.items() if not name.startswith("warmroute")}
        best = dict(best_of_each(peers).values())
        for name in ("warmroute", "warmroute+session"):
            if name in rows and best and agent in (None, "all"):
                print(f"  {name}")
                met &= check_targets(rows[name], best, agent is not None)
    sys.exit(0 if met else 1)


main()
