"""Streams with keep-alive events, which the SDKs have to skip.

Starts a simulated replica that serves one request at a time, or one whose events
have ids, and a proxy of its own with short intervals. WARMROUTE is the program to
start.
"""

import contextlib
import http.server
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.request

import anthropic
import openai

PROMPT = [{"role": "user", "content": "hello"}]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class ProxyTest(unittest.TestCase):
    """Tests with a proxy of their own."""

    @classmethod
    def start_proxy(cls, replica_port, backend, **settings):
        """Start a proxy in front of the replica, and set url to it once it is ready."""
        proxy, admin = free_ports(2)
        cls.url = f"http://127.0.0.1:{proxy}"
        config = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory())) / "warmroute.yaml"
        config.write_text(
            json.dumps(
                {
                    "listen": f"127.0.0.1:{proxy}",
                    "admin": f"127.0.0.1:{admin}",
                    "backends": [{"url": f"http://127.0.0.1:{replica_port}", **backend}],
                    **settings,
                }
            )
        )
        cls.start("serve", "--config", str(config))
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{cls.url}/readyz", timeout=2).close()
                return
            assert time.monotonic() < deadline, "the proxy did not become ready within 30 s"
            time.sleep(0.1)

    @classmethod
    def start(cls, *arguments):
        process = subprocess.Popen([os.environ["WARMROUTE"], *arguments], stderr=subprocess.DEVNULL)
        cls.addClassCleanup(process.wait)
        cls.addClassCleanup(process.kill)


class ReplicaWithEventIDs(http.server.BaseHTTPRequestHandler):
    """A replica whose events have ids, and that is silent for several keep-alive intervals between them."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        models = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","root":"m","parent":null}]}'
        body = models if self.path == "/v1/models" else b""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in ("Hel", "lo"):
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            chunk = {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
            self.write_chunk(f"id: 7\ndata: {json.dumps(chunk)}\n\n: ping\r\n\r\n")
            time.sleep(0.5)
        self.write_chunk("data: [DONE]\n\n")
        self.write_chunk("")

    def write_chunk(self, text):
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def log_message(self, *_):
        pass


class KeepaliveAfterEventID(ProxyTest):
    """Once an event had an id, an empty line is an event without data to OpenAI's SDK."""

    def test_chat(self):
        replica = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ReplicaWithEventIDs)
        self.addCleanup(replica.server_close)
        serving = threading.Thread(target=replica.serve_forever)
        serving.start()
        self.addCleanup(serving.join)
        self.addCleanup(replica.shutdown)
        self.start_proxy(replica.server_port, {}, sse={"keepalive": "100ms"})
        chat = {"model": "m", "messages": PROMPT, "stream": True}
        ask = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(chat).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(ask, timeout=60) as stream:
            self.assertIn(b": keep-alive\n", stream.read())
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            chunks = list(client.chat.completions.create(**chat))
        self.assertEqual("".join(c.choices[0].delta.content for c in chunks), "Hello")


class BusyReplicaTest(ProxyTest):
    """Tests with requests behind one that keeps the only replica busy."""

    busy_timeout = "60s"

    @classmethod
    def setUpClass(cls):
        (replica,) = free_ports(1)
        cls.start("sim", "--listen", f"127.0.0.1:{replica}", "--step-time", "50ms")
        cls.start_proxy(
            replica,
            {"max_in_flight": 1},
            routing={"queue": {"busy_timeout": cls.busy_timeout}},
            sse={"queue_keepalive": "200ms"},
        )

    def setUp(self):
        self.openai = self.enterContext(openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60))
        self.anthropic = self.enterContext(
            anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=60)
        )

    @contextlib.contextmanager
    def replica_busy(self):
        """Occupy the replica with a stream, until the function that this yields is called."""
        with self.openai.chat.completions.create(
            model="sim", messages=PROMPT, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
            yield stream.close


class QueueKeepalive(BusyReplicaTest):
    """Requests whose response begins with keep-alive events."""

    def test_chat(self):
        with self.replica_busy() as release:
            stream = self.openai.chat.completions.create(model="sim", messages=PROMPT, stream=True, max_tokens=5)
            self.assertEqual(stream.response.headers["x-warmroute-reason"], "queued")
            release()
            chunks = list(stream)
        self.assertTrue("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
        self.assertIn(chunks[-1].choices[0].finish_reason, ("stop", "length"))

    def test_completion(self):
        with self.replica_busy() as release:
            stream = self.openai.completions.create(model="sim", prompt="hello", stream=True, max_tokens=5)
            self.assertEqual(stream.response.headers["x-warmroute-reason"], "queued")
            release()
            self.assertTrue("".join(c.choices[0].text for c in stream))

    def test_response(self):
        with self.replica_busy() as release:
            stream = self.openai.responses.create(model="sim", input="hello", stream=True, max_output_tokens=5)
            self.assertEqual(stream.response.headers["x-warmroute-reason"], "queued")
            release()
            kinds = [e.type for e in stream]
        self.assertEqual((kinds[0], kinds[-1][: len("response.")]), ("response.created", "response."))

    def test_message(self):
        with self.replica_busy() as release:
            with self.anthropic.messages.stream(model="sim", messages=PROMPT, max_tokens=5) as stream:
                self.assertEqual(stream.response.headers["x-warmroute-reason"], "queued")
                release()
                self.assertTrue(stream.get_final_text())


class ErrorAfterQueueKeepalive(BusyReplicaTest):
    """The SDKs raise errors that come after keep-alive events."""

    busy_timeout = "3s"

    def test_chat(self):
        with self.replica_busy():
            stream = self.openai.chat.completions.create(model="sim", messages=PROMPT, stream=True, max_tokens=5)
            with self.assertRaisesRegex(openai.APIError, "try again in"):
                list(stream)

    def test_response(self):
        with self.replica_busy():
            stream = self.openai.responses.create(model="sim", input="hello", stream=True, max_output_tokens=5)
            with self.assertRaisesRegex(openai.APIError, "try again in"):
                list(stream)

    def test_message(self):
        with self.replica_busy():
            with self.anthropic.messages.stream(model="sim", messages=PROMPT, max_tokens=5) as stream:
                with self.assertRaisesRegex(anthropic.APIStatusError, "try again in"):
                    stream.get_final_text()


if __name__ == "__main__":
    unittest.main()
