"""A replica dies under load: what was not yet committed succeeds elsewhere, and a restarted replica is used again."""

import concurrent.futures
import threading
import unittest

import openai

import fleet

CHATS = 30
TURNS = 3


class Conversation:
    """One chat of several turns, streamed or not, and what became of them."""

    def __init__(self, client, stream):
        self.client, self.stream = client, stream
        self.messages = fleet.chat_of(100)
        self.answered = 0
        self.retried = 0  # answers that took more than one attempt
        self.broken = 0  # streams that ended with an error after they had begun

    def play(self, started):
        for _ in range(TURNS):
            text = self.streamed_turn() if self.stream else self.plain_turn()
            self.messages.append({"role": "assistant", "content": text})
            self.messages.append({"role": "user", "content": fleet.words(20)})
            started.set()

    def create(self, **options):
        return self.client.chat.completions.with_raw_response.create(
            model=fleet.MODEL, messages=self.messages, max_tokens=150, extra_body={"ignore_eos": True}, **options
        )

    def plain_turn(self):
        answer = self.create()
        self.note_attempts(answer)
        self.answered += 1
        return answer.parse().choices[0].message.content

    def streamed_turn(self):
        """Play one turn; only a stream that has yielded something may fail, and then it must say so."""
        text, begun, finish = "", False, None
        answer = self.create(stream=True)
        self.note_attempts(answer)
        try:
            for chunk in answer.parse():
                begun = True
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
        except openai.APIError as error:
            # A connection that just ends is not an answer either: the stream has to carry the error.
            if not begun or isinstance(error, openai.APIConnectionError):
                raise
            self.broken += 1
            return text
        if finish != "length":
            raise AssertionError(f"a stream ended with finish_reason {finish} and no error")
        self.answered += 1
        return text

    def note_attempts(self, answer):
        self.retried += int(answer.headers["x-warmroute-attempts"]) > 1


class ReplicaKilled(unittest.TestCase):
    def test_under_load(self):
        # The first replica serves other suites as well; the last is the one to lose.
        victim = fleet.REPLICAS[-1]
        client = openai.OpenAI(**fleet.options())
        self.addCleanup(client.close)
        chats = [Conversation(client, stream=i % 2 == 0) for i in range(CHATS)]
        started = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(CHATS) as pool:
            played = [pool.submit(chat.play, started) for chat in chats]
            self.assertTrue(started.wait(120), "no turn was answered")
            fleet.eventually(lambda: fleet.running([victim]) > 0, "the victim has work")
            fleet.kill(victim)
            self.addCleanup(self.restart, victim)
            for future in played:
                future.result()

        answered, broken = sum(chat.answered for chat in chats), sum(chat.broken for chat in chats)
        retried = sum(chat.retried for chat in chats)
        print(f"{answered} answered, {retried} of them by another replica, {broken} streams broken after they began")
        self.assertEqual(answered + broken, CHATS * TURNS)
        self.assertGreater(retried + broken, 0, "the victim had nothing to lose: the test showed nothing")

    def restart(self, victim):
        fleet.restart(victim)
        fleet.eventually(lambda: fleet.serves(victim), "the restarted replica gets traffic again")
