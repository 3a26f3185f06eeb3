// A replica dies under load: what was not yet committed succeeds elsewhere, and
// a restarted replica is used again.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { chatOf, client, eventually, kill, model, replicas, restart, running, serves, words } from "./fleet.mjs";

const chats = 30;
const turns = 3;
const openai = client();

// What became of the turns: answers, those of them that took more than one
// attempt, and streams that ended with an error after they had begun.
const seen = { answered: 0, retried: 0, broken: 0 };

async function ask(messages, stream) {
  const request = { model, messages, stream, max_tokens: 150, ignore_eos: true };
  const { data, response } = await openai.chat.completions.create(request).withResponse();
  if (Number(response.headers.get("x-warmroute-attempts")) > 1) seen.retried++;
  return data;
}

async function plainTurn(messages) {
  const answer = await ask(messages, false);
  seen.answered++;
  return answer.choices[0].message.content;
}

// streamedTurn may fail only after it has yielded something, and then with an
// error that the stream carries, not with a connection that just ends.
async function streamedTurn(messages) {
  let text = "";
  let begun = false;
  let finish = null;
  try {
    for await (const chunk of await ask(messages, true)) {
      begun = true;
      text += chunk.choices[0].delta.content ?? "";
      finish = chunk.choices[0].finish_reason ?? finish;
    }
  } catch (error) {
    if (!begun || !(error instanceof OpenAI.APIError) || error instanceof OpenAI.APIConnectionError) throw error;
    seen.broken++;
    return text;
  }
  assert.equal(finish, "length", "a stream ended early and without an error");
  seen.answered++;
  return text;
}

async function play(turn, firstAnswer) {
  const messages = chatOf(100);
  for (let i = 0; i < turns; i++) {
    messages.push({ role: "assistant", content: await turn(messages) }, { role: "user", content: words(20) });
    firstAnswer();
  }
}

test("a replica killed under load", async (t) => {
  const victim = replicas.at(-1);
  let firstAnswer;
  const started = new Promise((resolve) => (firstAnswer = resolve));
  const played = Promise.all(
    Array.from({ length: chats }, (_, i) => play(i % 2 === 0 ? streamedTurn : plainTurn, firstAnswer)),
  );
  await Promise.race([started, played]);
  await eventually(async () => (await running([victim])) > 0, "the victim has work");
  await kill(victim);
  try {
    await played;
  } finally {
    await restart(victim);
  }

  t.diagnostic(JSON.stringify(seen));
  assert.equal(seen.answered + seen.broken, chats * turns);
  assert.ok(seen.retried + seen.broken > 0, "the victim had nothing to lose: the test showed nothing");
  await eventually(() => serves(victim), "the restarted replica gets traffic again");
});
