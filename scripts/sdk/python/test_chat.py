"""What an application does all day: chats, streams, tools, usage, models."""

import json
import unittest

import openai

import fleet

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Chat(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(**fleet.options())
        self.addCleanup(self.client.close)
        self.create = self.client.chat.completions.create

    def test_answer_with_usage(self):
        answer = self.create(model=fleet.MODEL, messages=fleet.chat_of(20), max_tokens=12, extra_body={"ignore_eos": True})
        self.assertEqual(answer.object, "chat.completion")
        self.assertEqual(answer.choices[0].message.role, "assistant")
        self.assertEqual(answer.choices[0].finish_reason, "length")
        self.assertTrue(answer.choices[0].message.content)
        self.assertEqual(answer.usage.completion_tokens, 12)
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + 12)

    def test_stream_says_what_the_plain_answer_says(self):
        request = {"model": fleet.MODEL, "messages": fleet.chat_of(20), "max_tokens": 24, "temperature": 0}
        plain = self.create(**request)
        chunks = list(self.create(**request, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        self.assertEqual(text, plain.choices[0].message.content)
        self.assertEqual(chunks[-1].choices[0].finish_reason, plain.choices[0].finish_reason)
        self.assertTrue(all(chunk.usage is None for chunk in chunks), "usage nobody asked for")

    def test_stream_with_usage(self):
        options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
        chunks = list(self.create(model=fleet.MODEL, messages=fleet.chat_of(20), max_tokens=12, **options))
        self.assertEqual(chunks[-1].choices, [])
        self.assertEqual(chunks[-1].usage.completion_tokens, 12)

    def test_several_choices(self):
        answer = self.create(model=fleet.MODEL, messages=fleet.chat_of(20), max_tokens=4, n=2)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1])

    def test_next_turn_finds_its_prefix(self):
        messages = fleet.chat_of(120)
        for turn in range(3):
            answer = self.client.chat.completions.with_raw_response.create(
                model=fleet.MODEL, messages=messages, max_tokens=16
            )
            backend, completion = answer.headers["x-warmroute-backend"], answer.parse()
            if turn > 0:
                self.assertEqual(backend, home, "a chat moved between idle replicas")
                self.assertGreater(completion.usage.prompt_tokens_details.cached_tokens, 0)
                predicted, total = map(int, answer.headers["x-warmroute-predicted-tokens"].split("/"))
                self.assertLess(0, predicted)
                self.assertLessEqual(predicted, total)
            home = backend
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
            messages.append({"role": "user", "content": fleet.words(10)})

    def test_next_streamed_turn_finds_its_prefix(self):
        messages = fleet.chat_of(120)
        for turn in range(2):
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(self.create(model=fleet.MODEL, messages=messages, max_tokens=16, **options))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": fleet.words(10)})
        self.assertGreater(chunks[-1].usage.prompt_tokens_details.cached_tokens, 0)

    def test_new_chats_spread_over_the_fleet(self):
        backends = fleet.backends_of_new_chats(16)
        self.assertGreater(len(set(backends)), 1, backends)


class Tools(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(**fleet.options())
        self.addCleanup(self.client.close)
        # The weights are random: only a forced choice makes the model call a tool.
        self.request = {
            "model": fleet.MODEL,
            "messages": fleet.chat_of(80),
            "tools": [WEATHER],
            "tool_choice": "required",
            "max_tokens": 300,
            "temperature": 0,
        }

    def test_call_and_result(self):
        message = self.client.chat.completions.create(**self.request).choices[0].message
        call = message.tool_calls[0]
        self.assertEqual(call.function.name, "weather")
        self.assertIsInstance(json.loads(call.function.arguments), dict)

        self.request["messages"] += [
            {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'},
        ]
        answer = self.client.chat.completions.create(**self.request | {"tool_choice": "auto", "max_tokens": 8})
        self.assertEqual(answer.usage.completion_tokens, 8)
        self.assertGreater(answer.usage.prompt_tokens_details.cached_tokens, 0)

    def test_named_choice(self):
        choice = {"type": "function", "function": {"name": "weather"}}
        answer = self.client.chat.completions.create(**self.request | {"tool_choice": choice})
        self.assertEqual(answer.choices[0].message.tool_calls[0].function.name, "weather")

    def test_streamed_call(self):
        name = arguments = ""
        for chunk in self.client.chat.completions.create(**self.request, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            finish = chunk.choices[0].finish_reason
        self.assertEqual((name, finish), ("weather", "tool_calls"))
        self.assertIsInstance(json.loads(arguments), dict)


class OtherEndpoints(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(**fleet.options())
        self.addCleanup(self.client.close)

    def test_name_of_a_model(self):
        anthropic, client = fleet.limited_clients("shared")
        with anthropic, client:
            request = {"model": "gpt-4o", "messages": fleet.chat_of(20)}
            for asked, generated in ({"max_tokens": 5}, 5), ({"max_completion_tokens": 100}, 12), ({}, 12):
                answer = client.chat.completions.create(**request, **asked)
                self.assertEqual((answer.model, answer.usage.completion_tokens), (fleet.MODEL, generated))
            *_, usage = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
            self.assertEqual((usage.model, usage.usage.completion_tokens), (fleet.MODEL, 12))
            self.assertEqual([model.id for model in client.models.list().data], [fleet.MODEL, "gpt-4o"])

    def test_models(self):
        models = self.client.models.list().data
        self.assertEqual([model.id for model in models], [fleet.MODEL])
        self.assertEqual(models[0].max_model_len, 8192)  # vLLM's own field, which OpenAI's API lacks
        self.assertEqual(self.client.models.retrieve(fleet.MODEL).id, fleet.MODEL)

    def test_completions(self):
        request = {"model": fleet.MODEL, "prompt": fleet.words(20), "max_tokens": 12, "temperature": 0}
        plain = self.client.completions.create(**request)
        chunks = self.client.completions.create(**request, stream=True)
        self.assertEqual("".join(chunk.choices[0].text for chunk in chunks), plain.choices[0].text)
