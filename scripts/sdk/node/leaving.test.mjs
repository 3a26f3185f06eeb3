// A client that leaves frees the replica: nothing is computed for nobody.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import OpenAI from "openai";
import { chatOf, client, eventually, generated, model, running } from "./fleet.mjs";

const openai = client();

// Fills most of the context window: nobody can mistake an answer that ran to its end for one that was cut.
const answer = 7000;
const request = { model, max_tokens: answer, ignore_eos: true };

const idle = async () => (await running()) === 0;
let before;

beforeEach(async () => {
  await eventually(idle, "replicas idle before the test");
  before = await generated();
});

async function checkFreed() {
  await eventually(idle, "replicas idle after the client left");
  assert.ok((await generated()) - before < answer, "the answer was computed to its end");
}

test("in mid-stream", async () => {
  const stream = await openai.chat.completions.create({ ...request, messages: chatOf(20), stream: true });
  let seen = 0;
  for await (const _ of stream) {
    if (++seen === 5) break; // leaving the loop aborts the request
  }
  await checkFreed();
});

test("while waiting for a plain answer", async () => {
  const leave = new AbortController();
  const asked = openai.chat.completions.create({ ...request, messages: chatOf(20) }, { signal: leave.signal });
  const refused = assert.rejects(asked, OpenAI.APIUserAbortError);
  await eventually(async () => !(await idle()), "the request runs");
  leave.abort();
  await refused;
  await checkFreed();
});
