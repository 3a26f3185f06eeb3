#!/usr/bin/env python3
"""Play chats against one router and print what was measured, as one line of JSON.

Each chat opens with one of eight shared system prompts of
about 700 words and has six turns: 60 to 200 words, with outputs of exactly 16 to
48 tokens. The same seed gives the same chats, whatever serves them; outputs
are fed back as the SDK delivers them.

TTFT is the time from asking to the first chunk that carries text, in
milliseconds; the hit ratio is cached over all prompt tokens, as the replicas
count them in `usage`.
"""

import argparse
import concurrent.futures
import json
import random
import statistics
import sys
import time

import openai

PROMPTS, TURNS = 8, 6
WORDS = """the of and to in is that for it as with on by at from this have are not which their one more when
about would people other some time first into could work should system between data through country number
question public different within government however company important history without during market research
several another example result program student process change report service local development""".split()


def text(rng, low, high):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def make_chats(seed, chats):
    """Return the chats as (system prompt, [(user text, output tokens), ...])."""
    rng = random.Random(seed)
    prompts = [text(rng, 650, 750) for _ in range(PROMPTS)]
    return [
        (rng.choice(prompts), [(text(rng, 60, 200), rng.randint(16, 48)) for _ in range(TURNS)])
        for _ in range(chats)
    ]


def ask(client, messages, tokens):
    """Stream one output; return its text, the milliseconds to its first token and to its end, and its usage."""
    asked, first, parts, usage, finish = time.monotonic(), None, [], None, None
    stream = client.chat.completions.create(
        model="tiny",
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
            if choice.delta.content:
                first = first or time.monotonic()
                parts.append(choice.delta.content)
    if usage is None or first is None or finish != "length":
        raise RuntimeError(f"incomplete output: finish_reason {finish}, usage {usage}")
    return "".join(parts), (first - asked) * 1000, (time.monotonic() - asked) * 1000, usage


def play(client, chat):
    """Play a chat to its end or its first error; return (TTFT, time to the end, prompt tokens, cached tokens) by turn, and the error."""
    system, turns = chat
    messages = [{"role": "system", "content": system}]
    measured = []
    for user, tokens in turns:
        messages.append({"role": "user", "content": user})
        try:
            output, ttft, e2e, usage = ask(client, messages, tokens)
        except (openai.OpenAIError, RuntimeError) as error:
            return measured, f"{type(error).__name__}: {error}"
        measured.append((ttft, e2e, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
        messages.append({"role": "assistant", "content": output})
    return measured, None


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--name", required=True, help="the contender, as the table names it")
    options.add_argument("--url", required=True, help="its base URL, ending in /v1")
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--chats", type=int, required=True)
    options.add_argument("--at-once", type=int, required=True)
    options = options.parse_args()

    # Retries by the SDK would hide a router's errors.
    client = openai.OpenAI(base_url=options.url, api_key="none", max_retries=0, timeout=300)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        played = list(pool.map(lambda chat: play(client, chat), make_chats(options.seed, options.chats)))
    wall = time.monotonic() - began

    turns = [turn for measured, _ in played for turn in measured]
    errors = [error for _, error in played if error]
    for error in errors:
        print(f"{options.name}: {error}", file=sys.stderr)
    if len(turns) < 2:
        sys.exit(f"{options.name}: too few responses to measure")
    ttfts = [ttft for ttft, _, _, _ in turns]
    percentiles = statistics.quantiles(ttfts, n=100, method="inclusive")
    result = {
        "name": options.name,
        "errors": len(errors),
        "hit_ratio": sum(cached for _, _, _, cached in turns) / sum(prompt for _, _, prompt, _ in turns),
        "ttft_mean_ms": statistics.mean(ttfts),
        "ttft_p50_ms": percentiles[49],
        "ttft_p90_ms": percentiles[89],
        "ttft_p99_ms": percentiles[98],
        "e2e_mean_ms": statistics.mean(e2e for _, e2e, _, _ in turns),
        "wall_s": wall,
        "prompt_tokens": sum(prompt for _, _, prompt, _ in turns),
    }
    print(json.dumps(result))
    print(f"{options.name}: hit ratio {result['hit_ratio']:.3f}, TTFT {result['ttft_mean_ms']:.0f} ms, {wall:.0f} s", file=sys.stderr)


main()
