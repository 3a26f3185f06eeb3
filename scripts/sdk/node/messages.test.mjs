// Anthropic's SDK: messages, streams, tools, the count of tokens, and its errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { anthropicClient, cancelOnLimitedProxy, limitedClients, limitedProxyIdle, messageOf, model, occupy, words } from "./fleet.mjs";

const anthropic = anthropicClient();

const weather = {
  name: "weather",
  description: "The weather in a city",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

test("stream says what the plain answer says", async () => {
  const request = messageOf(20, 24);
  const plain = await anthropic.messages.create(request);
  const stream = anthropic.messages.stream(request);
  assert.equal(await stream.finalText(), plain.content[0].text);
  const final = await stream.finalMessage();
  assert.equal(final.stop_reason, plain.stop_reason);
  assert.equal(final.usage.output_tokens, plain.usage.output_tokens);
});

test("the next turn finds its prefix on the same backend", async () => {
  const request = messageOf(120);
  const backends = [];
  let usage;
  for (let turn = 0; turn < 3; turn++) {
    const { data, response } = await anthropic.messages.create(request).withResponse();
    backends.push(response.headers.get("x-warmroute-backend"));
    usage = data.usage;
    request.messages.push({ role: "assistant", content: data.content }, { role: "user", content: words(10) });
  }
  assert.deepEqual(backends, Array(3).fill(backends[0]));
  assert.ok(usage.cache_read_input_tokens > 0);
});

test("tool call and its result", async () => {
  // The weights are random: only a forced choice makes the model call a tool.
  const request = { ...messageOf(80, 300), tools: [weather], tool_choice: { type: "any" } };
  const { content, stop_reason } = await anthropic.messages.create(request);
  assert.equal(stop_reason, "tool_use");
  const call = content.find((block) => block.type === "tool_use");
  assert.equal(call.name, "weather");

  const streamed = await anthropic.messages.stream(request).finalMessage();
  assert.deepEqual(
    streamed.content.filter((block) => block.type === "tool_use").map(({ name, input }) => ({ name, input })),
    [{ name: "weather", input: call.input }],
  );
  assert.equal(streamed.stop_reason, "tool_use");

  const result = { type: "tool_result", tool_use_id: call.id, content: '{"degrees":21}' };
  request.messages.push({ role: "assistant", content }, { role: "user", content: [result] });
  const answer = await anthropic.messages.create({ ...request, tool_choice: { type: "auto" }, max_tokens: 8 });
  assert.ok(answer.usage.cache_read_input_tokens > 0);
});

test("count of tokens", async () => {
  const { system, messages, ...rest } = messageOf(20);
  const counted = await anthropic.messages.countTokens({ model, system, messages });
  const { usage } = await anthropic.messages.create({ system, messages, ...rest });
  const prompt = usage.input_tokens + (usage.cache_read_input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0);
  assert.equal(counted.input_tokens, prompt);
});

// refused checks the error of a request, whether it streams or not: until a response has begun, an
// error is one with a status.
async function refused(client, errorClass, type, change = {}) {
  let refusal;
  for (const stream of [false, true]) {
    await assert.rejects(client.messages.create({ ...messageOf(5), ...change, stream }), (error) => {
      assert.ok(error instanceof errorClass, String(error));
      assert.equal(error.error.error.type, type);
      assert.ok(error.error.error.message);
      refusal = error;
      return true;
    });
  }
  return refusal;
}

test("request errors", async () => {
  await refused(anthropic, Anthropic.NotFoundError, "not_found_error", { model: "nobody" });
  await assert.rejects(anthropic.messages.create(messageOf(20_000)), Anthropic.BadRequestError);
});

test("wrong key", async () => {
  const [client] = limitedClients("wrong");
  await refused(client, Anthropic.AuthenticationError, "authentication_error");
});

test("limits", async () => {
  const [single] = limitedClients("single");
  const [shared] = limitedClients("shared");
  const releaseSingle = await occupy("single");
  let error = await refused(single, Anthropic.RateLimitError, "rate_limit_error");
  assert.ok(Number(error.headers.get("retry-after")) > 0);
  const releaseShared = await occupy("shared");
  error = await refused(shared, Anthropic.InternalServerError, "overloaded_error");
  assert.equal(error.status, 503);
  assert.ok(Number(error.headers.get("retry-after")) > 0);
  await Promise.all([releaseSingle(), releaseShared()]);
  await limitedProxyIdle();
});

test("retry after a limit", async () => {
  const statuses = [];
  const release = await occupy("single");
  const [client] = limitedClients("single", {
    maxRetries: 5,
    fetch: async (...request) => {
      const response = await fetch(...request);
      statuses.push(response.status);
      await release();
      return response;
    },
  });
  assert.equal((await client.messages.create(messageOf(5))).type, "message");
  assert.deepEqual([statuses[0], statuses.at(-1)], [429, 200]);
});

test("error in a stream", async () => {
  const [client] = limitedClients("shared");
  const stream = await client.messages.create({ ...messageOf(20, 7000), stream: true });
  await assert.rejects(
    async () => {
      for await (const event of stream) if (event.type === "content_block_start") await cancelOnLimitedProxy();
    },
    (error) => error instanceof Anthropic.APIError && error.error.error.type === "permission_error",
  );
});
