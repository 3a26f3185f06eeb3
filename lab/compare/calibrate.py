#!/usr/bin/env python3
"""Measure a vLLM engine, fit the simulated engine's parameters to it, and compare the two.

    calibrate.py fit --url URL            print flags of `warmroute sim`, fitted to the engine at URL
    calibrate.py play --url URL --url URL play chats to two engines and print a line of JSON
    calibrate.py speed                    print the speed of `warmroute sim`, from a line of each engine
    calibrate.py table                    print the medians of such lines, and whether they agree

Everything goes to /inference/v1/generate, which takes and returns token ids: a
prompt has the same tokens for vLLM and for the simulated engine.

The fit uses single prompts and groups of requests that decode together. Under load
an engine is slower, because its API server and the client need the same cores: by how
much is the ratio of two mean end-to-end latencies, of chats that are not compared. A chat opens with one of eight system prompts of 900
tokens and has six turns: 80 to 260 tokens, with outputs of exactly 16 to 48. Each
engine gets every second chat, six at a time.
"""

import argparse
import concurrent.futures
import http.client
import json
import random
import statistics
import sys
import time
import urllib.parse

import numpy

PROMPTS, CHATS, TURNS, AT_ONCE = 8, 48, 6, 6
# Ids of the model's vocabulary that are no special tokens.
LOWEST_ID, HIGHEST_ID = 300, 4000
TOLERANCE = 0.2
FIGURES = [("TTFT mean, ms", "ttft_mean_ms"), ("TTFT p90, ms", "ttft_p90_ms"), ("end to end mean, ms", "e2e_mean_ms"), ("hit ratio", "hit_ratio")]


def ids(rng, n):
    return rng.choices(range(LOWEST_ID, HIGHEST_ID), k=n)


def generate(url, prompt, tokens):
    """Stream one output; return its ids, the seconds to its first token and to its end, and the cached tokens."""
    body = {
        "token_ids": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {"max_tokens": tokens, "ignore_eos": True, "temperature": 0},
    }
    asked, first, output, usage = time.monotonic(), None, [], None
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=300)
    try:
        connection.request("POST", "/inference/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{url}: status {response.status}: {response.read(1000)}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if choice["token_ids"]:
                    first = first or time.monotonic()
                    output += choice["token_ids"]
        end = time.monotonic()
    finally:
        connection.close()
    if len(output) != tokens or usage is None:
        raise RuntimeError(f"{url}: {len(output)} of {tokens} tokens, usage {usage}")
    return output, first - asked, end - asked, usage["prompt_tokens_details"]["cached_tokens"]


def fit(url):
    """Return the engine's parameters from prompts alone on it, and from groups that decode together."""
    rng = random.Random(0)
    for _ in range(3):
        generate(url, ids(rng, 500), 4)

    # A prompt of n tokens, up to the step's budget, takes overhead + n/rate·(1 + depth·n/2).
    lengths = numpy.array([32, 128, 256, 512, 1024, 1536, 2000])
    seconds = [statistics.median(generate(url, ids(rng, int(n)), 1)[1] for _ in range(7)) for n in lengths]
    design = numpy.stack([numpy.ones(len(lengths)), lengths, lengths**2 / 2], axis=1)
    _, per_token, per_square = numpy.linalg.lstsq(design, numpy.array(seconds), rcond=None)[0]
    if per_square < 0:
        per_token, per_square = numpy.linalg.lstsq(design[:, :2], numpy.array(seconds), rcond=None)[0][1], 0

    # A step in which n requests decode over contexts of c tokens takes
    # step + n·decode + n·c·context.
    design, seconds = [], []
    for n in (1, 2, 4, 6):
        for context in (64, 512, 1500):
            prompts = [ids(rng, context) for _ in range(n)]
            with concurrent.futures.ThreadPoolExecutor(n) as pool:
                # Once to fill the cache, so that all of them start to decode together.
                list(pool.map(lambda prompt: generate(url, prompt, 1), prompts))
                generated = list(pool.map(lambda prompt: generate(url, prompt, 48), prompts))
            design.append([1, n, n * (context + 24)])
            seconds.append(statistics.mean((end - first) / 47 for _, first, end, _ in generated))
    step, decode, per_context = numpy.linalg.lstsq(numpy.array(design), numpy.array(seconds), rcond=None)[0]
    return {
        "--prefill-rate": f"{1 / per_token:.0f}",
        "--quadratic": f"{min(1, per_square / per_token):.2g}",
        "--step-time": f"{max(step, 1e-5) * 1e6:.0f}us",
        "--decode-time": f"{max(decode, 1e-6) * 1e6:.0f}us",
        "--context-time": f"{max(per_context, 1e-9) * 1e9:.0f}ns",
        "--prompt-token-time": "0s",  # in the prefill rate
    }


def play_chat(url, system, turns):
    """Play a chat; return (seconds to the first token, to the end, prompt tokens, cached tokens) by turn."""
    prompt, measured = list(system), []
    for user, tokens in turns:
        prompt += user
        output, first, end, cached = generate(url, prompt, tokens)
        measured.append((first, end, len(prompt), cached))
        prompt += output
    return measured


def play(urls, seed):
    rng = random.Random(1000 + seed)
    prompts = [ids(rng, 900) for _ in range(PROMPTS)]
    chats = [
        (rng.choice(prompts), [(ids(rng, rng.randint(80, 260)), rng.randint(16, 48)) for _ in range(TURNS)])
        for _ in range(CHATS)
    ]
    pools = [concurrent.futures.ThreadPoolExecutor(AT_ONCE) for _ in urls]
    played = [pools[i % len(urls)].submit(play_chat, urls[i % len(urls)], *chat) for i, chat in enumerate(chats)]
    turns = [turn for each in played for turn in each.result()]
    for pool in pools:
        pool.shutdown()
    ttfts = [1000 * first for first, _, _, _ in turns]
    return {
        "ttft_mean_ms": statistics.mean(ttfts),
        "ttft_p90_ms": statistics.quantiles(ttfts, n=10, method="inclusive")[8],
        "e2e_mean_ms": 1000 * statistics.mean(end for _, end, _, _ in turns),
        "hit_ratio": sum(cached for _, _, _, cached in turns) / sum(length for _, _, length, _ in turns),
    }


def speed(lines):
    """Return by how much vLLM is faster than the simulated engine with the fitted rates."""
    e2e = {run["engine"]: run["e2e_mean_ms"] for run in map(json.loads, lines)}
    return e2e["sim"] / e2e["vllm"]


def table(lines):
    """Print the medians by size of the KV cache; return whether all agree within the tolerance."""
    runs, agree = {}, True
    for line in lines:
        run = json.loads(line)
        runs.setdefault(run["kv_tokens"], {}).setdefault(run["engine"], []).append(run)
    print(f"{'KV tokens':>9}  {'':20} {'vLLM':>8} {'sim':>8} {'sim/vLLM':>9}")
    for kv, by_engine in runs.items():
        for title, key in FIGURES:
            vllm, sim = (statistics.median(run[key] for run in by_engine[engine]) for engine in ("vllm", "sim"))
            good = abs(sim / vllm - 1) <= TOLERANCE
            agree = agree and good
            digits = 3 if key == "hit_ratio" else 0
            print(f"{kv:>9}  {title:20} {vllm:>8.{digits}f} {sim:>8.{digits}f} {sim / vllm:>9.2f}{'' if good else '  MISS'}")
    return agree


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("part", choices=["fit", "play", "speed", "table"])
    options.add_argument("--url", action="append", help="an engine's URL, without /v1")
    options.add_argument("--engine", help="vllm or sim, as the line names it")
    options.add_argument("--kv-tokens", type=int, help="size of its KV cache, as the line names it")
    options.add_argument("--seed", type=int, default=1)
    options = options.parse_args()
    if options.part == "fit":
        print(" ".join(f"{flag} {value}" for flag, value in fit(options.url[0]).items()))
    elif options.part == "play":
        result = {"engine": options.engine, "kv_tokens": options.kv_tokens} | play(options.url, options.seed)
        print(json.dumps(result))
    elif options.part == "speed":
        print(f"{speed(sys.stdin):.2f}")
    else:
        sys.exit(0 if table(sys.stdin) else 1)


main()
