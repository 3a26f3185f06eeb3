// OpenAI's SDK on /v1/responses: text, streams, tools and errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { cancelOnLimitedProxy, client, limitedClients, limitedProxyIdle, model, occupy, words } from "./fleet.mjs";

const openai = client();

const weather = {
  type: "function",
  name: "weather",
  description: "The weather in a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

// responseOf returns a request for a new conversation whose instructions have count words.
function responseOf(count, maxTokens = 16) {
  const input = [{ role: "user", content: words(10) }];
  return { model, instructions: words(count), input, max_output_tokens: maxTokens };
}

test("stream says what the plain answer says", async () => {
  const request = { ...responseOf(20, 24), temperature: 0 };
  const plain = await openai.responses.create(request);
  let text = "";
  let last;
  for await (const event of await openai.responses.create({ ...request, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.equal(text, plain.output_text);
  assert.equal(last.type, "response.completed");
  assert.equal(last.response.usage.output_tokens, plain.usage.output_tokens);
});

test("the next turn finds its prefix on the same backend", async () => {
  const request = responseOf(120);
  const backends = [];
  let usage;
  for (let turn = 0; turn < 3; turn++) {
    const { data, response } = await openai.responses.create(request).withResponse();
    backends.push(response.headers.get("x-warmroute-backend"));
    usage = data.usage;
    request.input.push({ role: "assistant", content: data.output_text }, { role: "user", content: words(10) });
  }
  assert.deepEqual(backends, Array(3).fill(backends[0]));
  assert.ok(usage.input_tokens_details.cached_tokens > 0);
});

test("tool call and its result", async () => {
  // The weights are random: only a forced choice makes the model call a tool.
  const request = { ...responseOf(80, 300), tools: [weather], tool_choice: "required", temperature: 0 };
  const call = (await openai.responses.create(request)).output.at(-1);
  assert.deepEqual([call.type, call.name], ["function_call", "weather"]);
  JSON.parse(call.arguments);

  let streamed = "";
  for await (const event of await openai.responses.create({ ...request, stream: true })) {
    if (event.type === "response.function_call_arguments.delta") streamed += event.delta;
  }
  assert.equal(streamed, call.arguments);

  const { call_id, name, arguments: given } = call;
  request.input.push({ type: "function_call", call_id, name, arguments: given });
  request.input.push({ type: "function_call_output", call_id, output: '{"degrees":21}' });
  const answer = await openai.responses.create({ ...request, tool_choice: "auto", max_output_tokens: 8 });
  assert.ok(answer.usage.input_tokens_details.cached_tokens > 0);
});

// refused checks the error of a request, whether it streams or not: until a response has begun, an
// error is one with a status.
async function refused(from, errorClass, code, change = {}) {
  let refusal;
  for (const stream of [false, true]) {
    await assert.rejects(from.responses.create({ ...responseOf(5), ...change, stream }), (error) => {
      assert.ok(error instanceof errorClass, String(error));
      assert.equal(error.code, code);
      refusal = error;
      return true;
    });
  }
  return refusal;
}

test("request errors", async () => {
  await refused(openai, OpenAI.NotFoundError, "model_not_found", { model: "nobody" });
  await assert.rejects(openai.responses.create(responseOf(20_000)), OpenAI.BadRequestError);
});

test("wrong key", async () => {
  const [, wrong] = limitedClients("wrong");
  await refused(wrong, OpenAI.AuthenticationError, "invalid_api_key");
});

test("limits", async () => {
  const [, single] = limitedClients("single");
  const [, shared] = limitedClients("shared");
  const releaseSingle = await occupy("single");
  let error = await refused(single, OpenAI.RateLimitError, "rate_limit_exceeded");
  assert.ok(Number(error.headers.get("retry-after")) > 0);
  const releaseShared = await occupy("shared");
  error = await refused(shared, OpenAI.InternalServerError, "too_many_requests");
  assert.equal(error.status, 503);
  assert.ok(Number(error.headers.get("retry-after")) > 0);
  await Promise.all([releaseSingle(), releaseShared()]);
  await limitedProxyIdle();
});

test("error in a stream", async () => {
  const [, shared] = limitedClients("shared");
  const stream = await shared.responses.create({ ...responseOf(20, 7000), stream: true });
  await assert.rejects(
    async () => {
      for await (const event of stream) if (event.type === "response.content_part.added") await cancelOnLimitedProxy();
    },
    (error) => error instanceof OpenAI.APIError && error.code === "cancelled",
  );
});
