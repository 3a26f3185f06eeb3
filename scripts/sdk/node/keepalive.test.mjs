// Streams that wait in the admission queue: the SDKs have to skip the keep-alive
// events, and raise later errors. Starts a simulated replica that serves one request
// at a time, and a proxy of its own with a short sse.queue_keepalive.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const messages = [{ role: "user", content: "hello" }];
const processes = [];
let directory, url, openai, anthropic;

async function freePort() {
  const server = createServer().listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  return port;
}

function start(...args) {
  processes.push(spawn(process.env.WARMROUTE, args, { stdio: "ignore" }));
}

before(async () => {
  const [replica, proxy, admin] = [await freePort(), await freePort(), await freePort()];
  url = `http://127.0.0.1:${proxy}`;
  directory = await mkdtemp(join(tmpdir(), "keepalive-"));
  const config = {
    listen: `127.0.0.1:${proxy}`,
    admin: `127.0.0.1:${admin}`,
    backends: [{ url: `http://127.0.0.1:${replica}`, max_in_flight: 1 }],
    routing: { queue: { busy_timeout: "3s" } },
    sse: { queue_keepalive: "200ms" },
  };
  await writeFile(join(directory, "warmroute.yaml"), JSON.stringify(config));
  start("sim", "--listen", `127.0.0.1:${replica}`, "--step-time", "50ms");
  start("serve", "--config", join(directory, "warmroute.yaml"));
  for (const deadline = Date.now() + 30_000; ; await sleep(100)) {
    if (await fetch(`${url}/readyz`).then((r) => r.ok, () => false)) break;
    assert.ok(Date.now() < deadline, "the proxy did not become ready within 30 s");
  }
  openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
  anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 60_000 });
});

after(async () => {
  for (const p of processes) {
    const exited = new Promise((resolve) => p.once("exit", resolve));
    p.kill("SIGKILL");
    await exited;
  }
  await rm(directory, { recursive: true });
});

// whileBusy calls f while the replica is busy with a stream of that many tokens, of 50 ms each.
async function whileBusy(tokens, f) {
  const stream = await openai.chat.completions.create({ model: "sim", messages, stream: true, max_tokens: tokens, ignore_eos: true });
  await stream[Symbol.asyncIterator]().next();
  try {
    await f();
  } finally {
    stream.controller.abort();
  }
}

async function collect(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

test("a queued chat", () =>
  whileBusy(20, async () => {
    const chunks = await collect(await openai.chat.completions.create({ model: "sim", messages, stream: true, max_tokens: 5 }));
    assert.ok(chunks.map((c) => c.choices[0]?.delta.content ?? "").join(""));
  }));

test("a queued response", () =>
  whileBusy(20, async () => {
    const events = await collect(await openai.responses.create({ model: "sim", input: "hello", stream: true, max_output_tokens: 5 }));
    assert.equal(events[0].type, "response.created");
  }));

test("a queued message", () =>
  whileBusy(20, async () => {
    const events = await collect(anthropic.messages.stream({ model: "sim", messages, max_tokens: 5 }));
    assert.equal(events[0].type, "message_start");
    assert.equal(events.at(-1).type, "message_stop");
  }));

test("a chat that is refused after a keep-alive event", () =>
  whileBusy(100, async () => {
    const stream = await openai.chat.completions.create({ model: "sim", messages, stream: true, max_tokens: 5 });
    await assert.rejects(collect(stream), (e) => e instanceof OpenAI.APIError && /try again in/.test(e.message));
  }));

test("a response that is refused after a keep-alive event", () =>
  whileBusy(100, async () => {
    const stream = await openai.responses.create({ model: "sim", input: "hello", stream: true, max_output_tokens: 5 });
    await assert.rejects(collect(stream), (e) => e instanceof OpenAI.APIError && /try again in/.test(e.message));
  }));

test("a message that is refused after a keep-alive event", () =>
  whileBusy(100, async () => {
    const stream = anthropic.messages.stream({ model: "sim", messages, max_tokens: 5 });
    await assert.rejects(stream.finalMessage(), (e) => e instanceof Anthropic.APIError && /try again in/.test(e.message));
  }));
