"""Streams that wait in the admission queue: the SDKs have to skip the keep-alive events, and raise later errors.

Starts a simulated replica that serves one request at a time, and a proxy of its
own with a short sse.queue_keepalive. WARMROUTE is the program to start.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import tempfile
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


class QueueKeepalive(unittest.TestCase):
    """Requests behind one that keeps the only replica busy."""

    @classmethod
    def setUpClass(cls):
        replica, proxy, admin = free_ports(3)
        cls.url = f"http://127.0.0.1:{proxy}"
        config = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory())) / "warmroute.yaml"
        config.write_text(
            json.dumps(
                {
                    "listen": f"127.0.0.1:{proxy}",
                    "admin": f"127.0.0.1:{admin}",
                    "backends": [{"url": f"http://127.0.0.1:{replica}", "max_in_flight": 1}],
                    "routing": {"queue": {"time": "3s"}},
                    "sse": {"queue_keepalive": "200ms"},
                }
            )
        )
        cls.start("sim", "--listen", f"127.0.0.1:{replica}", "--step-time", "50ms")
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

    def setUp(self):
        self.openai = self.enterContext(openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60))
        self.anthropic = self.enterContext(
            anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=60)
        )

    @contextlib.contextmanager
    def replica_busy(self, tokens):
        """Occupy the replica with a stream of that many tokens, of 50 ms each."""
        with self.openai.chat.completions.create(
            model="sim", messages=PROMPT, stream=True, max_tokens=tokens, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
            yield

    def test_chat(self):
        with self.replica_busy(20):
            stream = self.openai.chat.completions.create(model="sim", messages=PROMPT, stream=True, max_tokens=5)
            self.assertEqual(stream.response.headers["x-warmroute-reason"], "queued")
            chunks = list(stream)
        self.assertTrue("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
        self.assertIn(chunks[-1].choices[0].finish_reason, ("stop", "length"))

    def test_completion(self):
        with self.replica_busy(20):
            stream = self.openai.completions.create(model="sim", prompt="hello", stream=True, max_tokens=5)
            self.assertEqual(stream.response.headers["x-warmroute-reason"], "queued")
            self.assertTrue("".join(c.choices[0].text for c in stream))

    def test_response(self):
        with self.replica_busy(20):
            stream = self.openai.responses.create(model="sim", input="hello", stream=True, max_output_tokens=5)
            self.assertEqual(stream.response.headers["x-warmroute-reason"], "queued")
            kinds = [e.type for e in stream]
        self.assertEqual((kinds[0], kinds[-1][: len("response.")]), ("response.created", "response."))

    def test_message(self):
        with self.replica_busy(20):
            with self.anthropic.messages.stream(model="sim", messages=PROMPT, max_tokens=5) as stream:
                self.assertEqual(stream.response.headers["x-warmroute-reason"], "queued")
                self.assertTrue(stream.get_final_text())

    def test_chat_refused(self):
        with self.replica_busy(100):
            stream = self.openai.chat.completions.create(model="sim", messages=PROMPT, stream=True, max_tokens=5)
            with self.assertRaisesRegex(openai.APIError, "try again in"):
                list(stream)

    def test_response_refused(self):
        with self.replica_busy(100):
            stream = self.openai.responses.create(model="sim", input="hello", stream=True, max_output_tokens=5)
            with self.assertRaisesRegex(openai.APIError, "try again in"):
                list(stream)

    def test_message_refused(self):
        with self.replica_busy(100):
            with self.anthropic.messages.stream(model="sim", messages=PROMPT, max_tokens=5) as stream:
                with self.assertRaisesRegex(anthropic.APIStatusError, "try again in"):
                    stream.get_final_text()


if __name__ == "__main__":
    unittest.main()
