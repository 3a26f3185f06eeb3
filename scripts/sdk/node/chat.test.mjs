// What an application does all day: chats, streams, tools, usage, models.

import assert from "node:assert/strict";
import { test } from "node:test";
import { chatOf, client, model, words } from "./fleet.mjs";

const openai = client();

const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "The weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

// The weights are random: only a forced choice makes the model call a tool.
function forced() {
  return { model, messages: chatOf(80), tools: [weather], tool_choice: "required", max_tokens: 300, temperature: 0 };
}

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

function textOf(chunks) {
  return chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
}

test("answer with usage", async () => {
  const request = { model, messages: chatOf(20), max_tokens: 12, ignore_eos: true };
  const answer = await openai.chat.completions.create(request);
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, 12);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 12);
});

test("stream says what the plain answer says", async () => {
  const request = { model, messages: chatOf(20), max_tokens: 24, temperature: 0 };
  const plain = await openai.chat.completions.create(request);
  const chunks = await collect(await openai.chat.completions.create({ ...request, stream: true }));
  assert.equal(textOf(chunks), plain.choices[0].message.content);
  assert.equal(chunks.at(-1).choices[0].finish_reason, plain.choices[0].finish_reason);
});

test("the SDK's stream helper gathers the whole answer", async () => {
  const options = { stream_options: { include_usage: true }, ignore_eos: true, max_tokens: 12 };
  const stream = openai.chat.completions.stream({ model, messages: chatOf(20), ...options });
  assert.equal((await stream.totalUsage()).completion_tokens, 12);
  assert.ok((await stream.finalContent()).length > 0);
});

test("the next turn finds its prefix on the same backend", async () => {
  const messages = chatOf(120);
  const options = { stream: true, stream_options: { include_usage: true }, max_tokens: 16 };
  const backends = [];
  let usage;
  for (let turn = 0; turn < 3; turn++) {
    const asked = openai.chat.completions.create({ model, messages, ...options });
    const { data, response } = await asked.withResponse();
    const chunks = await collect(data);
    backends.push(response.headers.get("x-warmroute-backend"));
    usage = chunks.at(-1).usage;
    messages.push({ role: "assistant", content: textOf(chunks) }, { role: "user", content: words(10) });
  }
  assert.deepEqual(backends, Array(3).fill(backends[0]));
  assert.ok(usage.prompt_tokens_details.cached_tokens > 0);
});

test("tool call and its result", async () => {
  const request = forced();
  const { message } = (await openai.chat.completions.create(request)).choices[0];
  assert.equal(message.tool_calls[0].function.name, "weather");
  JSON.parse(message.tool_calls[0].function.arguments);

  request.messages.push({ role: "assistant", content: "", tool_calls: message.tool_calls });
  request.messages.push({ role: "tool", tool_call_id: message.tool_calls[0].id, content: '{"degrees":21}' });
  const answer = await openai.chat.completions.create({ ...request, tool_choice: "auto", max_tokens: 8 });
  assert.ok(answer.usage.prompt_tokens_details.cached_tokens > 0);
});

test("streamed tool call", async () => {
  const chunks = await collect(await openai.chat.completions.create({ ...forced(), stream: true }));
  const calls = chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? []);
  assert.equal(calls.map((call) => call.function.name ?? "").join(""), "weather");
  JSON.parse(calls.map((call) => call.function.arguments ?? "").join(""));
});

test("models", async () => {
  const { data } = await openai.models.list();
  assert.deepEqual(
    data.map(({ id, max_model_len }) => ({ id, max_model_len })),
    [{ id: model, max_model_len: 8192 }],
  );
  assert.equal((await openai.models.retrieve(model)).id, model);
});

test("completions", async () => {
  const answer = await openai.completions.create({ model, prompt: words(20), max_tokens: 12, ignore_eos: true });
  assert.equal(answer.usage.completion_tokens, 12);
});
