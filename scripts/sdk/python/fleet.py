"""The fleet under test: warmroute's address, the replicas behind it, and what they say of themselves.

scripts/sdk/run sets the environment: PROXY_URL is the proxy's public
listener, REPLICA_URLS the replicas', separated by commas. LIMITED_PROXY_URL and
LIMITED_ADMIN_URL are the listeners of a proxy that requires the key "single",
which may have one request in flight, or "shared", and serves two at once.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import re
import subprocess
import time
import urllib.parse
import urllib.request

import anthropic
import openai

PROXY = os.environ["PROXY_URL"]
LIMITED_PROXY = os.environ["LIMITED_PROXY_URL"]
LIMITED_ADMIN = os.environ["LIMITED_ADMIN_URL"]
REPLICAS = os.environ["REPLICA_URLS"].split(",")
VLLM_CPU = pathlib.Path(__file__).resolve().parents[2] / "vllm-cpu"
MODEL = "tiny"

WORDS = "river stone copper lantern meadow signal harbor violet engine winter paper orbit saddle marble thunder".split()


def options():
    """Return how every client reaches the proxy. No retries by the SDK: what fails here must be seen to fail."""
    return {"base_url": f"{PROXY}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}


def anthropic_options():
    """Return what options returns, for Anthropic's SDK."""
    return {"base_url": PROXY, "api_key": "none", "max_retries": 0, "timeout": 120}


def limited_clients(key, **more):
    """Return Anthropic's and OpenAI's client of the limited proxy."""
    with_key = {"api_key": key, **more}
    return (
        anthropic.Anthropic(**anthropic_options() | with_key | {"base_url": LIMITED_PROXY}),
        openai.OpenAI(**options() | with_key | {"base_url": f"{LIMITED_PROXY}/v1"}),
    )


@contextlib.contextmanager
def occupied(key):
    """Keep one request of the key in flight on the limited proxy."""
    client, _ = limited_clients(key)
    with client, client.messages.create(**message_of(20, max_tokens=7000), stream=True) as stream:
        next(iter(stream))
        yield


def cancel_on_limited_proxy():
    """Cancel the requests in flight on the limited proxy, as an operator does."""
    time.sleep(0.3)  # a state is served for a quarter of a second: this one is not from before the call
    with urllib.request.urlopen(f"{LIMITED_ADMIN}/api/state", timeout=10) as answer:
        requests = json.load(answer)["requests"]["oldest"]
    for request in requests:
        url = f"{LIMITED_ADMIN}/api/requests/{request['handle']}/cancel"
        order = urllib.request.Request(url, data=b"", headers={"Content-Type": "application/json"}, method="POST")
        urllib.request.urlopen(order, timeout=10).close()


def message_of(count, max_tokens=16):
    """Return a Messages request for a new conversation whose system prompt has count words."""
    return {
        "model": MODEL,
        "system": words(count),
        "messages": [{"role": "user", "content": words(10)}],
        "max_tokens": max_tokens,
        "extra_body": {"temperature": 0},  # which the SDK no longer has
    }


def words(count):
    """Return count random words: a text that no earlier request has left in a cache."""
    return " ".join(random.choices(WORDS, k=count)) + f" {random.random()}"


def chat_of(count):
    """Return the messages of a new conversation whose system prompt has count words."""
    return [{"role": "system", "content": words(count)}, {"role": "user", "content": words(10)}]


def metric(replica, name):
    """Return the sum of a metric's series on one replica."""
    with urllib.request.urlopen(f"{replica}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))


def running(replicas=REPLICAS):
    """Return how many requests the replicas compute or queue."""
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(metric(replica, gauge) for replica in replicas for gauge in gauges)


def generated():
    """Return how many tokens the replicas have produced so far."""
    return sum(metric(replica, "vllm:generation_tokens_total") for replica in REPLICAS)


def eventually(condition, what, within=60):
    """Wait until condition() holds. The bound only keeps a broken run from hanging."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {what}")
        time.sleep(0.1)


def port(replica):
    return urllib.parse.urlsplit(replica).port


def kill(replica):
    """Kill the process of a replica at once."""
    subprocess.run([VLLM_CPU / "down.sh", "--kill", str(port(replica))], check=True)


def restart(replica):
    """Start a killed replica again and wait until it is healthy."""
    subprocess.run(
        [VLLM_CPU / "up.sh", str(port(replica)), str(port(replica) + 1000)], check=True, stdout=subprocess.DEVNULL
    )


def backends_of_new_chats(count):
    """Return the backends that answered new conversations, all sent through the proxy at once.

    Single ones would go to the fastest of the replicas that are idle, which may always be the same one.
    """
    with openai.OpenAI(**options()) as client, concurrent.futures.ThreadPoolExecutor(count) as pool:
        ask = client.chat.completions.with_raw_response.create
        answers = [pool.submit(ask, model=MODEL, messages=chat_of(80), max_tokens=1) for _ in range(count)]
        return [answer.result().headers["x-warmroute-backend"] for answer in answers]


def serves(replica):
    """Report whether one of several new conversations is answered by this replica."""
    return any(backend.endswith(f":{port(replica)}") for backend in backends_of_new_chats(6))
