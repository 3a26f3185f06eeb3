"""OpenAI's SDK on /v1/responses: text, streams, tools and exceptions."""

import json
import unittest

import openai

import fleet

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def response_of(count, max_tokens=16):
    """Return a request for a new conversation whose instructions have count words."""
    conversation = [{"role": "user", "content": fleet.words(10)}]
    return {"model": fleet.MODEL, "instructions": fleet.words(count), "input": conversation, "max_output_tokens": max_tokens}


class Responses(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(**fleet.options())
        self.addCleanup(self.client.close)
        self.create = self.client.responses.create

    def test_stream_says_what_the_plain_answer_says(self):
        request = response_of(20, max_tokens=24) | {"temperature": 0}
        plain = self.create(**request)
        with self.client.responses.stream(**request) as stream:
            events = list(stream)
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        self.assertEqual(text, plain.output_text)
        self.assertEqual(events[-1].type, "response.completed")
        self.assertEqual(events[-1].response.usage.output_tokens, plain.usage.output_tokens)

    def test_next_turn_finds_its_prefix(self):
        request = response_of(120)
        for turn in range(3):
            answer = self.client.responses.with_raw_response.create(**request)
            backend, response = answer.headers["x-warmroute-backend"], answer.parse()
            if turn > 0:
                self.assertEqual(backend, home, "a conversation moved between idle replicas")
                self.assertGreater(response.usage.input_tokens_details.cached_tokens, 0)
                self.assertGreater(int(answer.headers["x-warmroute-predicted-tokens"].split("/")[0]), 0)
            home = backend
            request["input"] += [{"role": "assistant", "content": response.output_text}, {"role": "user", "content": fleet.words(10)}]

    def test_tool_call_and_its_result(self):
        # The weights are random: only a forced choice makes the model call a tool.
        request = response_of(80, max_tokens=300) | {"tools": [WEATHER], "tool_choice": "required", "temperature": 0}
        call = self.create(**request).output[-1]
        self.assertEqual((call.type, call.name), ("function_call", "weather"))
        self.assertIsInstance(json.loads(call.arguments), dict)

        events = list(self.create(**request, stream=True))
        arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        self.assertEqual(arguments, call.arguments)
        self.assertEqual(events[-1].response.output[-1].name, "weather")

        result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 21}'}
        request["input"] += [call.model_dump(include={"type", "call_id", "name", "arguments"}), result]
        answer = self.create(**request | {"tool_choice": "auto", "max_output_tokens": 8})
        self.assertGreater(answer.usage.input_tokens_details.cached_tokens, 0)


class Errors(unittest.TestCase):
    """Whether it streams or not: until a response has begun, an error is one with a status."""

    def refused(self, client, exception, code, **change):
        for stream in (False, True):
            with self.subTest(stream=stream), self.assertRaises(exception) as caught:
                client.responses.create(**response_of(5) | change, stream=stream)
            self.assertEqual(caught.exception.code, code)
            self.assertTrue(caught.exception.message)
        return caught.exception

    def test_request_errors(self):
        with openai.OpenAI(**fleet.options()) as client:
            self.refused(client, openai.NotFoundError, "model_not_found", model="nobody")
            with self.assertRaises(openai.BadRequestError) as caught:
                client.responses.create(**response_of(20_000))
            self.assertIn("maximum context length", caught.exception.message)

    def test_wrong_key(self):
        _, client = fleet.limited_clients("wrong")
        with client:
            self.refused(client, openai.AuthenticationError, "invalid_api_key")

    def test_limits(self):
        _, single = fleet.limited_clients("single")
        _, shared = fleet.limited_clients("shared")
        with single, shared, fleet.occupied("single"):
            error = self.refused(single, openai.RateLimitError, "rate_limit_exceeded")
            self.assertGreater(int(error.response.headers["retry-after"]), 0)
            with fleet.occupied("shared"):
                error = self.refused(shared, openai.InternalServerError, "too_many_requests")
            self.assertEqual(error.status_code, 503)
            self.assertGreater(int(error.response.headers["retry-after"]), 0)

    def test_error_in_a_stream(self):
        _, client = fleet.limited_clients("shared")
        with client, client.responses.create(**response_of(20, max_tokens=7000), stream=True) as stream:
            with self.assertRaises(openai.APIError) as caught:
                for event in stream:
                    if event.type == "response.output_text.delta":
                        fleet.cancel_on_limited_proxy()
        self.assertEqual(caught.exception.code, "cancelled")
