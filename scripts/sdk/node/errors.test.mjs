// Errors arrive as the SDK's own classes, with the fields an application branches on.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { chatOf, client, model } from "./fleet.mjs";

const openai = client();

for (const stream of [false, true]) {
  test(`unknown model, stream ${stream}`, async () => {
    const asked = openai.chat.completions.create({ model: "nobody", messages: chatOf(5), stream });
    await assert.rejects(asked, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  });

  test(`prompt longer than the context, stream ${stream}`, async () => {
    const asked = openai.chat.completions.create({ model, messages: chatOf(20_000), stream });
    await assert.rejects(asked, (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError, String(error));
      assert.match(error.message, /maximum context length/);
      return true;
    });
  });
}

test("body that is not JSON", async () => {
  for (const body of ["{", '{"model":"tiny","messages":[', "[1]"]) {
    const response = await fetch(`${openai.baseURL}/chat/completions`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body,
    });
    assert.equal(response.status, 400, body);
    assert.ok((await response.json()).error.message, body);
  }
});

test("unknown path", async () => {
  await assert.rejects(openai.batches.list(), OpenAI.NotFoundError);
});
