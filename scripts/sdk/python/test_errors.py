"""Errors arrive as the SDK's own exceptions, with the fields an application branches on."""

import unittest

import openai

import fleet


class Errors(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(**fleet.options())
        self.addCleanup(self.client.close)

    def test_unknown_model(self):
        for stream in (False, True):
            with self.subTest(stream=stream), self.assertRaises(openai.NotFoundError) as caught:
                self.client.chat.completions.create(model="nobody", messages=fleet.chat_of(5), stream=stream)
            self.assertEqual(caught.exception.code, "model_not_found")
            self.assertIn(fleet.MODEL, caught.exception.message, "the models there are should be named")

    def test_unknown_model_asked_for_by_name(self):
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("nobody")

    def test_prompt_longer_than_the_context(self):
        for stream in (False, True):
            with self.subTest(stream=stream), self.assertRaises(openai.BadRequestError) as caught:
                self.client.chat.completions.create(model=fleet.MODEL, messages=fleet.chat_of(20_000), stream=stream)
            self.assertIn("maximum context length", caught.exception.message)

    def test_setting_out_of_range(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model=fleet.MODEL, messages=fleet.chat_of(5), temperature=-1)
        self.assertIn("temperature", caught.exception.message)

    def test_body_that_is_not_json(self):
        for body in (b"", b"{", b'{"model":"tiny","messages":[', b"\xff\xfe", b"[1]"):
            with self.subTest(body=body), self.assertRaises(openai.BadRequestError) as caught:
                self.client.post(
                    "/chat/completions", content=body, cast_to=object, options={"headers": {"Content-Type": "application/json"}}
                )
            self.assertTrue(caught.exception.message)

    def test_unknown_path(self):
        with self.assertRaises(openai.NotFoundError):
            self.client.batches.list()

    def test_the_proxy_serves_on(self):
        answer = self.client.chat.completions.create(model=fleet.MODEL, messages=fleet.chat_of(5), max_tokens=1)
        self.assertEqual(len(answer.choices), 1)
