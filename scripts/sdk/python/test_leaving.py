"""A client that leaves frees the replica: nothing is computed for nobody."""

import asyncio
import unittest

import openai

import fleet

# Fills most of the context window: nobody can mistake an answer that ran to its end for one that was cut.
ANSWER = 7000
REQUEST = {"model": fleet.MODEL, "max_tokens": ANSWER, "extra_body": {"ignore_eos": True}}


class Leaving(unittest.TestCase):
    def setUp(self):
        fleet.eventually(lambda: fleet.running() == 0, "replicas idle before the test")
        self.before = fleet.generated()

    def check_freed(self):
        fleet.eventually(lambda: fleet.running() == 0, "replicas idle after the client left")
        self.assertLess(fleet.generated() - self.before, ANSWER, "the answer was computed to its end")

    def test_in_mid_stream(self):
        with openai.OpenAI(**fleet.options()) as client:
            stream = client.chat.completions.create(messages=fleet.chat_of(20), stream=True, **REQUEST)
            for _ in range(5):
                next(stream)
            stream.close()
            self.check_freed()

    def test_while_waiting_for_a_plain_answer(self):
        async def leave():
            async with openai.AsyncOpenAI(**fleet.options()) as client:
                asking = asyncio.create_task(client.chat.completions.create(messages=fleet.chat_of(20), **REQUEST))
                while await asyncio.to_thread(fleet.running) == 0:
                    self.assertFalse(asking.done(), "answered before it could be left")
                    await asyncio.sleep(0.05)
                asking.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await asking

        asyncio.run(leave())
        self.check_freed()
