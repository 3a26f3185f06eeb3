"""Anthropic's SDK: messages, streams, tools, the count of tokens, and its exceptions."""

import contextlib
import unittest

import anthropic

import fleet

WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Messages(unittest.TestCase):
    def setUp(self):
        self.client = anthropic.Anthropic(**fleet.anthropic_options())
        self.addCleanup(self.client.close)
        self.create = self.client.messages.create

    def test_answer_with_usage(self):
        answer = self.create(**fleet.message_of(20))
        self.assertEqual((answer.type, answer.role), ("message", "assistant"))
        self.assertTrue(answer.content[0].text)
        self.assertGreater(answer.usage.output_tokens, 0)

    def test_name_of_a_model(self):
        client, openai = fleet.limited_clients("shared")
        with client, openai:
            request = fleet.message_of(20, max_tokens=100) | {"model": "gpt-4o"}
            answer = client.messages.create(**request)
            self.assertEqual((answer.model, answer.stop_reason), (fleet.MODEL, "max_tokens"))
            self.assertEqual(answer.usage.output_tokens, 12)
            count = client.messages.count_tokens(model="gpt-4o", system=request["system"], messages=request["messages"])
            self.assertGreater(count.input_tokens, 20)

    def test_stream_says_what_the_plain_answer_says(self):
        request = fleet.message_of(20, max_tokens=24) 
        plain = self.create(**request)
        with self.client.messages.stream(**request) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, plain.content[0].text)
        self.assertEqual(final.stop_reason, plain.stop_reason)
        self.assertEqual(final.usage.output_tokens, plain.usage.output_tokens)

    def test_next_turn_finds_its_prefix(self):
        request = fleet.message_of(120)
        for turn in range(3):
            answer = self.client.messages.with_raw_response.create(**request)
            backend, message = answer.headers["x-warmroute-backend"], answer.parse()
            if turn > 0:
                self.assertEqual(backend, home, "a conversation moved between idle replicas")
                self.assertGreater(message.usage.cache_read_input_tokens, 0)
                self.assertGreater(int(answer.headers["x-warmroute-predicted-tokens"].split("/")[0]), 0)
            home = backend
            request["messages"].append({"role": "assistant", "content": message.content})
            request["messages"].append({"role": "user", "content": fleet.words(10)})

    def test_tool_call_and_its_result(self):
        # The weights are random: only a forced choice makes the model call a tool.
        request = fleet.message_of(80, max_tokens=300) | {"tools": [WEATHER], "tool_choice": {"type": "any"}}
        answer = self.create(**request)
        self.assertEqual(answer.stop_reason, "tool_use")
        call = next(block for block in answer.content if block.type == "tool_use")
        self.assertEqual(call.name, "weather")
        self.assertIsInstance(call.input, dict)

        with self.client.messages.stream(**request) as stream:
            streamed = stream.get_final_message()
        self.assertEqual([block.name for block in streamed.content if block.type == "tool_use"], ["weather"])
        self.assertEqual(streamed.stop_reason, "tool_use")

        result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"degrees": 21}'}
        request["messages"] += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        answer = self.create(**request | {"tool_choice": {"type": "auto"}, "max_tokens": 8})
        self.assertGreater(answer.usage.cache_read_input_tokens, 0)

    def test_count_tokens(self):
        request = fleet.message_of(20)
        messages = {key: request[key] for key in ("model", "system", "messages")}
        counted = self.client.messages.count_tokens(**messages)
        usage = self.create(**request).usage
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        self.assertEqual(counted.input_tokens, prompt)


class Errors(unittest.TestCase):
    """Whether it streams or not: until a response has begun, an error is one with a status."""

    def refused(self, client, exception, kind, **change):
        for stream in (False, True):
            with self.subTest(stream=stream), self.assertRaises(exception) as caught:
                client.messages.create(**fleet.message_of(5) | change, stream=stream)
            error = caught.exception.body
            self.assertEqual((error["type"], error["error"]["type"]), ("error", kind))
            self.assertTrue(error["error"]["message"])
        return caught.exception

    def test_request_errors(self):
        with anthropic.Anthropic(**fleet.anthropic_options()) as client:
            self.refused(client, anthropic.NotFoundError, "not_found_error", model="nobody")
            with self.assertRaises(anthropic.BadRequestError) as caught:
                client.messages.create(**fleet.message_of(20_000))
            self.assertIn("maximum context length", str(caught.exception))
            with self.assertRaises(anthropic.BadRequestError):
                client.messages.create(**fleet.message_of(5) | {"messages": "hi"})
            with self.assertRaises(anthropic.NotFoundError):
                client.messages.count_tokens(model="nobody", messages=[{"role": "user", "content": "hi"}])

    def test_wrong_key(self):
        client, _ = fleet.limited_clients("wrong")
        with client:
            self.refused(client, anthropic.AuthenticationError, "authentication_error")

    def test_limits(self):
        single, _ = fleet.limited_clients("single")
        shared, _ = fleet.limited_clients("shared")
        with single, shared, fleet.occupied("single"):
            error = self.refused(single, anthropic.RateLimitError, "rate_limit_error")
            self.assertGreater(int(error.response.headers["retry-after"]), 0)
            with fleet.occupied("shared"):
                error = self.refused(shared, anthropic.InternalServerError, "overloaded_error")
            self.assertEqual(error.status_code, 503)
            self.assertGreater(int(error.response.headers["retry-after"]), 0)

    def test_retry_after_a_limit(self):
        statuses = []
        with contextlib.ExitStack() as occupied:

            def release(response):
                statuses.append(response.status_code)
                occupied.close()

            http = anthropic.DefaultHttpxClient(event_hooks={"response": [release]})
            client, _ = fleet.limited_clients("single", max_retries=5, http_client=http)
            with client:
                occupied.enter_context(fleet.occupied("single"))
                answer = client.messages.create(**fleet.message_of(5))
        self.assertEqual(answer.type, "message")
        self.assertEqual((statuses[0], statuses[-1]), (429, 200))

    def test_error_in_a_stream(self):
        client, _ = fleet.limited_clients("shared")
        with client, client.messages.create(**fleet.message_of(20, max_tokens=7000), stream=True) as stream:
            with self.assertRaises(anthropic.APIStatusError) as caught:
                for number, _ in enumerate(stream):
                    if number == 5:
                        fleet.cancel_on_limited_proxy()
        self.assertEqual(caught.exception.body["error"]["type"], "permission_error")
