#!/usr/bin/env python3
"""Record what a real vLLM answers, as golden files for the simulated replica.

Usage: capture.py URL OUT_DIR [open|keyed|abort]

`open` (the default) needs a vLLM that serves a small chat model as `tiny` with
a context of 8192 tokens, prefix caching, --enable-prompt-tokens-details and
tool calls, started with VLLM_SERVER_DEV_MODE=1. `keyed` records the few cases
that need a server with --api-key sk-golden. `abort` records what a request
gets that the engine aborts (POST /abort_requests of VLLM_SERVER_DEV_MODE=1):
abort-* once it generates, abort-early-* while it waits. It needs a server with
--max-num-seqs 1.

One file a case: the request as it was sent, then the answer with the chunked
framing undone. Sockets are used directly, since an HTTP library would tidy up
header names and order, which are part of what is recorded. Values that change
with every run (ids, times, the Date header) stay: the test compares shape.
"""
import json
import os
import re
import socket
import sys
import time
import urllib.parse

MODEL = "tiny"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, world"}]
FABLE = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 20}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
# Messages and Responses have the function without a wrapper, and tools of no arguments are called alike by all.
PING = {"name": "ping", "description": "Do nothing"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
LONG = "zq x " * 7000


def chat(**more):
    return {"model": MODEL, "messages": HELLO, "max_tokens": 4, "temperature": 0, "seed": 1, "ignore_eos": True, **more}


def completion(**more):
    return {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "seed": 1, "ignore_eos": True, **more}


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EOS = {"logit_bias": {"2": 100}, "ignore_eos": False, "max_tokens": 2000}  # the model ends its turn at once
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

MESSAGE_TOOL = {"model": MODEL, "messages": HELLO[1:], "max_tokens": 200, "temperature": 0, "tools": [PING | {"input_schema": NO_ARGUMENTS}], "tool_choice": {"type": "any"}}
RESPONSE_TOOL = {"model": MODEL, "input": "Hello", "max_output_tokens": 200, "temperature": 0, "tools": [{"type": "function"} | PING | {"parameters": NO_ARGUMENTS}], "tool_choice": "required"}

# name: (method, path, body, extra headers). A str or bytes body goes out as it is.
OPEN = {
    "chat": ("POST", CHAT, chat(), {}),
    "chat-request-id": ("POST", CHAT, chat(), {"X-Request-Id": "golden-1"}),
    "chat-stream": ("POST", CHAT, chat(stream=True), {}),
    "chat-stream-usage": ("POST", CHAT, chat(**USAGE), {}),
    "chat-stream-continuous-usage": ("POST", CHAT, chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}), {}),
    "chat-n": ("POST", CHAT, chat(n=2, temperature=1), {}),
    "chat-n-stream": ("POST", CHAT, chat(n=2, temperature=1, **USAGE), {}),
    "chat-no-model": ("POST", CHAT, {k: v for k, v in chat().items() if k != "model"}, {}),
    "chat-empty-model": ("POST", CHAT, chat(model=""), {}),
    "chat-max-completion-tokens": ("POST", CHAT, chat(max_tokens=9, max_completion_tokens=2), {}),
    "chat-text-parts": ("POST", CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]), {}),
    "chat-tools-auto": ("POST", CHAT, chat(tools=[WEATHER]), {}),
    "chat-tools-required": ("POST", CHAT, chat(tools=[WEATHER], tool_choice="required", max_tokens=200, ignore_eos=False), {}),
    "chat-tools-required-stream": ("POST", CHAT, chat(tools=[WEATHER], tool_choice="required", max_tokens=200, ignore_eos=False, **USAGE), {}),
    "chat-tools-named": ("POST", CHAT, chat(tools=[WEATHER], tool_choice=NAMED, max_tokens=200, ignore_eos=False), {}),
    "chat-tools-named-stream": ("POST", CHAT, chat(tools=[WEATHER], tool_choice=NAMED, max_tokens=200, ignore_eos=False, **USAGE), {}),
    "chat-eos": ("POST", CHAT, chat(**EOS), {}),
    "chat-eos-stream": ("POST", CHAT, chat(**EOS, **USAGE), {}),
    "completions": ("POST", COMPLETIONS, completion(), {}),
    "completions-stream": ("POST", COMPLETIONS, completion(stream=True), {}),
    "completions-stream-usage": ("POST", COMPLETIONS, completion(**USAGE), {}),
    "completions-list": ("POST", COMPLETIONS, completion(prompt=["Once", "upon a"]), {}),
    "completions-list-stream": ("POST", COMPLETIONS, completion(prompt=["Once", "upon a"], **USAGE), {}),
    "completions-token-ids": ("POST", COMPLETIONS, completion(prompt=[100, 200, 300]), {}),
    "completions-echo": ("POST", COMPLETIONS, completion(echo=True), {}),
    "responses": ("POST", "/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "temperature": 0}, {}),
    "responses-stream": ("POST", "/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "temperature": 0, "stream": True}, {}),
    "messages": ("POST", "/v1/messages", {"model": MODEL, "messages": HELLO[1:], "max_tokens": 4, "temperature": 0}, {}),
    "messages-stream": ("POST", "/v1/messages", {"model": MODEL, "messages": HELLO[1:], "max_tokens": 4, "temperature": 0, "stream": True}, {}),
    # A prompt of a few blocks, sent twice: the second time the cache has them.
    "messages-uncached": ("POST", "/v1/messages", {"model": MODEL, "messages": FABLE, "max_tokens": 4, "temperature": 0}, {}),
    "messages-cached": ("POST", "/v1/messages", {"model": MODEL, "messages": FABLE, "max_tokens": 4, "temperature": 0}, {}),
    "messages-cached-stream": ("POST", "/v1/messages", {"model": MODEL, "messages": FABLE, "max_tokens": 4, "temperature": 0, "stream": True}, {}),
    "messages-cached-chat": ("POST", CHAT, chat(messages=FABLE), {}),
    "messages-tools-any": ("POST", "/v1/messages", MESSAGE_TOOL, {}),
    "messages-tools-any-stream": ("POST", "/v1/messages", MESSAGE_TOOL | {"stream": True}, {}),
    "responses-tools-required": ("POST", "/v1/responses", RESPONSE_TOOL, {}),
    "responses-tools-required-stream": ("POST", "/v1/responses", RESPONSE_TOOL | {"stream": True}, {}),
    "messages-count-tokens": ("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO[1:]}, {}),
    "messages-unknown-model": ("POST", "/v1/messages", {"model": "nope", "messages": HELLO[1:], "max_tokens": 4}, {}),
    "messages-no-max-tokens": ("POST", "/v1/messages", {"model": MODEL, "messages": HELLO[1:]}, {}),
    "responses-unknown-model": ("POST", "/v1/responses", {"model": "nope", "input": "Hello"}, {}),
    "responses-previous": ("POST", "/v1/responses", {"model": MODEL, "input": "Hello", "previous_response_id": "resp_1"}, {}),
    "tokenize-prompt": ("POST", "/tokenize", {"model": MODEL, "prompt": "Hello"}, {}),
    "tokenize-messages": ("POST", "/tokenize", {"model": MODEL, "messages": HELLO}, {}),
    "tokenize-strings": ("POST", "/tokenize", {"model": MODEL, "prompt": "Hello", "return_token_strs": True}, {}),
    "tokenize-nothing": ("POST", "/tokenize", {"model": MODEL}, {}),
    "detokenize": ("POST", "/detokenize", {"model": MODEL, "tokens": [100, 200]}, {}),
    "models": ("GET", "/v1/models", None, {}),
    "models-id": ("GET", "/v1/models/tiny", None, {}),
    "models-head": ("HEAD", "/v1/models", None, {}),
    "models-post": ("POST", "/v1/models", {}, {}),
    "health": ("GET", "/health", None, {}),
    "health-head": ("HEAD", "/health", None, {}),
    "ping": ("GET", "/ping", None, {}),
    "version": ("GET", "/version", None, {}),
    "metrics": ("GET", "/metrics", None, {}),
    "reset-prefix-cache": ("POST", "/reset_prefix_cache", None, {}),
    "is-sleeping": ("GET", "/is_sleeping", None, {}),
    "unknown-path": ("GET", "/nope", None, {}),
    "unknown-path-post": ("POST", "/v1/nope", {}, {}),
    "root": ("GET", "/", None, {}),
    "chat-get": ("GET", CHAT, None, {}),
    "chat-head": ("HEAD", CHAT, None, {}),
    "chat-options": ("OPTIONS", CHAT, None, {}),
    "chat-put": ("PUT", CHAT, chat(), {}),
    "chat-slash": ("POST", CHAT + "/", chat(), {}),
    "error-bad-json": ("POST", CHAT, '{"model": "tiny", "messages": [', {}),
    "error-bad-json-value": ("POST", CHAT, '{"model": tiny}', {}),
    "error-empty-body": ("POST", CHAT, "", {}),
    "error-json-string": ("POST", CHAT, '"hello"', {}),
    "error-json-list": ("POST", CHAT, "[]", {}),
    "error-no-messages": ("POST", CHAT, {"model": MODEL}, {}),
    "error-messages-string": ("POST", CHAT, {"model": MODEL, "messages": "hi"}, {}),
    "error-messages-empty": ("POST", CHAT, {"model": MODEL, "messages": []}, {}),
    "error-message-no-role": ("POST", CHAT, {"model": MODEL, "messages": [{"content": "hi"}]}, {}),
    "error-message-null": ("POST", CHAT, {"model": MODEL, "messages": [None]}, {}),
    "error-model-number": ("POST", CHAT, chat(model=3), {}),
    "error-unknown-model": ("POST", CHAT, chat(model="nope"), {}),
    "error-unknown-model-stream": ("POST", CHAT, chat(model="nope", stream=True), {}),
    "error-unknown-model-completions": ("POST", COMPLETIONS, completion(model="nope"), {}),
    "error-unknown-model-tokenize": ("POST", "/tokenize", {"model": "nope", "prompt": "x"}, {}),
    "error-too-long": ("POST", CHAT, chat(messages=[{"role": "user", "content": LONG}]), {}),
    "error-too-long-stream": ("POST", CHAT, chat(messages=[{"role": "user", "content": LONG}], stream=True), {}),
    "error-too-long-completions": ("POST", COMPLETIONS, completion(prompt=LONG), {}),
    "error-max-tokens-zero": ("POST", CHAT, chat(max_tokens=0), {}),
    "error-max-tokens-negative": ("POST", CHAT, chat(max_tokens=-1), {}),
    "error-max-tokens-string": ("POST", CHAT, chat(max_tokens="many"), {}),
    "error-temperature": ("POST", CHAT, chat(temperature=-1), {}),
    "error-n-zero": ("POST", CHAT, chat(n=0), {}),
    "error-stream-options-without-stream": ("POST", CHAT, chat(stream_options={"include_usage": True}), {}),
    "error-tool-choice-without-tools": ("POST", CHAT, chat(tool_choice="required"), {}),
    "error-named-without-tools": ("POST", CHAT, chat(tool_choice=NAMED), {}),
    "error-named-unknown": ("POST", CHAT, chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nope"}}), {}),
    "error-image": ("POST", CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]), {}),
    "error-no-prompt": ("POST", COMPLETIONS, {"model": MODEL}, {}),
    "error-prompt-number": ("POST", COMPLETIONS, completion(prompt=3), {}),
    "error-content-type": ("POST", CHAT, chat(), {"Content-Type": "text/plain"}),
    "error-no-content-type": ("POST", CHAT, chat(), {"Content-Type": None}),
    "error-invalid-utf8": ("POST", CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}],"max_tokens":2}', {}),
    "error-lone-surrogate": ("POST", CHAT, '{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}],"max_tokens":2,"ignore_eos":true}', {}),
    "duplicate-model": ("POST", CHAT, '{"model":"nope","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"ignore_eos":true,"model":"tiny"}', {}),
    "unknown-field": ("POST", CHAT, chat(no_such_field=1), {}),
}
KEYED = {
    "keyed-none": ("POST", CHAT, chat(), {}),
    "keyed-wrong": ("POST", CHAT, chat(), {"Authorization": "Bearer wrong"}),
    "keyed-right": ("POST", CHAT, chat(), {"Authorization": "Bearer sk-golden"}),
    "keyed-models": ("GET", "/v1/models", None, {}),
    "keyed-health": ("GET", "/health", None, {}),
    "keyed-metrics-version": ("GET", "/version", None, {}),
    "keyed-unknown-path": ("GET", "/v1/nope", None, {}),
    "keyed-tokenize": ("POST", "/tokenize", {"model": MODEL, "prompt": "Hello"}, {}),
}

LATER = {"max_tokens": 4000, "temperature": 0}  # long enough to be aborted in its midst
ABORT = {
    "chat": (CHAT, {"model": MODEL, "messages": HELLO, "ignore_eos": True, **LATER}, {"stream_options": {"include_usage": True}}),
    "completions": (COMPLETIONS, {"model": MODEL, "prompt": "Once upon a time", "ignore_eos": True, **LATER}, {"stream_options": {"include_usage": True}}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 4000, "temperature": 0}, {}),
    "messages": ("/v1/messages", {"model": MODEL, "messages": HELLO[1:], **LATER}, {}),
}


def request(method, path, body, extra):
    headers = {"Host": "replica", "Connection": "close"}
    if body is None:
        data = b""
    elif isinstance(body, bytes):
        data = body
    else:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
    if body is not None:
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    headers |= extra
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items() if v is not None)
    return head.encode() + b"\r\n" + data


def exchange(address, raw):
    with socket.create_connection(address, timeout=120) as conn:
        conn.sendall(raw)
        answer = b""
        while piece := conn.recv(1 << 16):
            answer += piece
    return answer


def aborted(address, raw, early):
    """Send a request and abort it: while it waits if early, else when it generates."""
    if early:
        other = socket.create_connection(address, timeout=120)
        other.sendall(request("POST", CHAT, {**ABORT["chat"][1], "stream": True}, {}))
        other.recv(1)
        gauge(address, "running", 1)
    with socket.create_connection(address, timeout=120) as conn:
        conn.sendall(raw)
        gauge(address, "waiting" if early else "running", 1)
        if not early:
            time.sleep(0.03)
        exchange(address, request("POST", "/abort_requests", {}, {}))
        answer = b""
        while piece := conn.recv(1 << 16):
            answer += piece
    if early:
        other.close()
    gauge(address, "running", 0)
    return answer


def gauge(address, name, value):
    """Wait until the server says that so many requests are running, or waiting."""
    line = re.compile(rb"^vllm:num_requests_%s\{.*\} %.1f$" % (name.encode(), value), re.M)
    while not line.search(exchange(address, request("GET", "/metrics", None, {}))):
        time.sleep(0.01)


def unchunk(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        whole = b""
        while body:
            size, _, rest = body.partition(b"\r\n")
            n = int(size, 16)
            if n == 0:
                break
            whole, body = whole + rest[:n], rest[n + 2 :]
        body = whole
    return head + b"\r\n\r\n" + body


def main():
    url, out = urllib.parse.urlsplit(sys.argv[1]), sys.argv[2]
    address = (url.hostname, url.port)
    mode = sys.argv[3] if len(sys.argv) > 3 else "open"
    os.makedirs(out, exist_ok=True)
    if mode == "abort":
        for name, (path, body, stream) in ABORT.items():
            for when in "abort-", "abort-early-":
                for kind, more in ("", {}), ("-stream", {"stream": True, **stream}):
                    raw = request("POST", path, {**body, **more}, {})
                    save(out, when + name + kind, raw, aborted(address, raw, when == "abort-early-"))
        return
    for name, case in {"open": OPEN, "keyed": KEYED}[mode].items():
        raw = request(*case)
        save(out, name, raw, exchange(address, raw))


def save(out, name, raw, answer):
    answer = unchunk(answer)
    # Where the model lies is nobody's business.
    answer = re.sub(rb'"root":"[^"]*"', b'"root":"/models/tiny"', answer)
    with open(os.path.join(out, name + ".http"), "wb") as f:
        f.write(raw + b"\n=== response ===\n" + answer)
    print(name, answer.split(b"\r\n", 1)[0].decode())


main()
