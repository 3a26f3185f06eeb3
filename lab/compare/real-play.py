#!/usr/bin/env python3
"""Play chats against one router and print what was measured, as one line of JSON.

By default each chat opens with one of eight shared system prompts of
about 700 words and has six turns: 60 to 200 words, with outputs of exactly 16 to
48 tokens. The same seed gives the same chats, whatever serves them; outputs
are fed back as the SDK delivers them.

TTFT is the time from asking to the first chunk that carries text, in
milliseconds, or to the first chunk if none does, as random weights may have it;
TPOT is the time from there to the end over the other tokens. The hit ratio is
cached over all prompt tokens, as the replicas count them in `usage`. The client's
CPU is that of one core: near 1 the client is what is measured.
"""

import argparse
import concurrent.futures
import json
import random
import statistics
import sys
import time

import openai

WORDS = """the of and to in is that for it as with on by at from this have are not which their one more when
about would people other some time first into could work should system between data through country number
question public different within government however company important history without during market research
several another example result program student process change report service local development""".split()


def text(rng, bounds):
    return " ".join(rng.choices(WORDS, k=rng.randint(*bounds)))


def make_chats(options):
    """Return the chats as (system prompt, [(user text, output tokens, seconds to the next turn), ...])."""
    rng = random.Random(options.seed)
    prompts = [text(rng, options.system_words) for _ in range(options.prompts)]
    weights = [(i + 1) ** -options.skew for i in range(options.prompts)]

    def turn():
        think = rng.expovariate(1 / options.think) if options.think else 0
        return text(rng, options.user_words), rng.randint(*options.output_tokens), think

    def chat():
        system = rng.choices(prompts, weights)[0] if options.skew else rng.choice(prompts)
        return system, [turn() for _ in range(options.turns)]

    return [chat() for _ in range(options.chats)]


def ask(client, model, messages, tokens):
    """Stream one output; return its text, the milliseconds to its first token and to its end, and its usage."""
    asked, began, first, parts, usage, finish = time.monotonic(), None, None, [], None, None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            began = began or time.monotonic()
            if choice.delta.content:
                first = first or time.monotonic()
                parts.append(choice.delta.content)
    if usage is None or finish != "length" or usage.completion_tokens != tokens:
        raise RuntimeError(f"incomplete output: finish_reason {finish}, usage {usage}")
    return "".join(parts), ((first or began) - asked) * 1000, (time.monotonic() - asked) * 1000, usage


def play(client, model, chat):
    """Play a chat to its end or its first error; return (TTFT, E2E, TPOT, prompt tokens, cached tokens) by turn, and the error."""
    system, turns = chat
    messages = [{"role": "system", "content": system}]
    measured = []
    for user, tokens, think in turns:
        messages.append({"role": "user", "content": user})
        try:
            output, ttft, e2e, usage = ask(client, model, messages, tokens)
        except (openai.OpenAIError, RuntimeError) as error:
            return measured, f"{type(error).__name__}: {error}"
        tpot = (e2e - ttft) / max(1, tokens - 1)
        measured.append((ttft, e2e, tpot, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
        messages.append({"role": "assistant", "content": output})
        time.sleep(think)
    return measured, None


def low_high(argument):
    low, high = map(int, argument.split("-"))
    return low, high


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--name", required=True, help="the contender, as the table names it")
    options.add_argument("--url", required=True, help="its base URL, ending in /v1")
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--chats", type=int, required=True)
    options.add_argument("--at-once", type=int, required=True)
    options.add_argument("--model", default="tiny")
    options.add_argument("--prompts", type=int, default=8, help="system prompts")
    options.add_argument("--skew", type=float, default=0, help="exponent of their Zipf weights")
    options.add_argument("--system-words", type=low_high, default=(650, 750), metavar="LOW-HIGH")
    options.add_argument("--turns", type=int, default=6)
    options.add_argument("--user-words", type=low_high, default=(60, 200), metavar="LOW-HIGH")
    options.add_argument("--output-tokens", type=low_high, default=(16, 48), metavar="LOW-HIGH")
    options.add_argument("--think", type=float, default=0, help="mean seconds between an output and the next turn")
    options = options.parse_args()

    # Retries by the SDK would hide a router's errors.
    client = openai.OpenAI(base_url=options.url, api_key="none", max_retries=0, timeout=300)
    chats = make_chats(options)
    began, cpu = time.monotonic(), time.process_time()
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        played = list(pool.map(lambda chat: play(client, options.model, chat), chats))
    wall, cpu = time.monotonic() - began, time.process_time() - cpu

    turns = [turn for measured, _ in played for turn in measured]
    errors = [error for _, error in played if error]
    for error in errors:
        print(f"{options.name}: {error}", file=sys.stderr)
    if len(turns) < 2:
        sys.exit(f"{options.name}: too few responses to measure")
    ttfts, e2es, tpots, prompts, cached = zip(*turns)
    percentiles = statistics.quantiles(ttfts, n=100, method="inclusive")
    result = {
        "name": options.name,
        "errors": len(errors),
        "hit_ratio": sum(cached) / sum(prompts),
        "ttft_mean_ms": statistics.mean(ttfts),
        "ttft_p50_ms": percentiles[49],
        "ttft_p90_ms": percentiles[89],
        "ttft_p99_ms": percentiles[98],
        "e2e_mean_ms": statistics.mean(e2es),
        "tpot_mean_ms": statistics.mean(tpots),
        "requests_s": len(turns) / wall,
        "client_cpu": cpu / wall,
        "wall_s": wall,
        "prompt_tokens": sum(prompts),
    }
    print(json.dumps(result))
    print(f"{options.name}: hit ratio {result['hit_ratio']:.3f}, TTFT {result['ttft_mean_ms']:.0f} ms, {wall:.0f} s", file=sys.stderr)


main()
