// The fleet under test: warmroute's address, the replicas behind it, and what
// they say of themselves. scripts/sdk/run sets the environment.

import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const replicas = process.env.REPLICA_URLS.split(",");
export const model = "tiny";

const vocabulary = "river stone copper lantern meadow signal harbor violet engine winter paper orbit".split(" ");

// client reaches the proxy without retries by the SDK: what fails here must be seen to fail.
export function client() {
  return new OpenAI({ baseURL: `${process.env.PROXY_URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
}

// anthropicClient is client for Anthropic's SDK.
export function anthropicClient() {
  return new Anthropic({ baseURL: process.env.PROXY_URL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
}

// limitedClients are Anthropic's and OpenAI's client of the proxy that requires the key "single",
// which may have one request in flight, or "shared", and serves two at once.
export function limitedClients(apiKey, options = {}) {
  const baseURL = process.env.LIMITED_PROXY_URL;
  const all = { apiKey, maxRetries: 0, timeout: 120_000, ...options };
  return [new Anthropic({ baseURL, ...all }), new OpenAI({ baseURL: `${baseURL}/v1`, ...all })];
}

// occupy keeps one request of the key in flight on that proxy until the returned function is called.
export async function occupy(key) {
  const [anthropic] = limitedClients(key);
  const stream = await anthropic.messages.create({ ...messageOf(20, 7000), stream: true });
  const events = stream[Symbol.asyncIterator]();
  await events.next();
  return () => events.return();
}

// inFlightOnLimitedProxy returns the requests in flight there. A state is served for a quarter of a
// second: after this wait, it is not from before the call.
async function inFlightOnLimitedProxy() {
  await sleep(300);
  return (await (await fetch(`${process.env.LIMITED_ADMIN_URL}/api/state`)).json()).requests.oldest;
}

// limitedProxyIdle waits until the requests that clients have left are over there.
export function limitedProxyIdle() {
  return eventually(async () => (await inFlightOnLimitedProxy()).length === 0, "no request is in flight");
}

// cancelOnLimitedProxy cancels the requests in flight there, as an operator does.
export async function cancelOnLimitedProxy() {
  for (const { handle } of await inFlightOnLimitedProxy()) {
    const url = `${process.env.LIMITED_ADMIN_URL}/api/requests/${handle}/cancel`;
    await fetch(url, { method: "POST", headers: { "content-type": "application/json" } });
  }
}

// messageOf returns a Messages request for a new conversation whose system prompt has count words.
export function messageOf(count, maxTokens = 16) {
  const messages = [{ role: "user", content: words(10) }];
  return { model, system: words(count), messages, max_tokens: maxTokens, temperature: 0 };
}

// words returns count random words: a text that no earlier request has left in a cache.
export function words(count) {
  const picked = Array.from({ length: count }, () => vocabulary[Math.floor(Math.random() * vocabulary.length)]);
  return `${picked.join(" ")} ${Math.random()}`;
}

// chatOf returns the messages of a new conversation whose system prompt has count words.
export function chatOf(count) {
  return [
    { role: "system", content: words(count) },
    { role: "user", content: words(10) },
  ];
}

async function metric(replica, name) {
  const text = await (await fetch(`${replica}/metrics`)).text();
  const series = text.matchAll(new RegExp(`^${name}(?:{[^}]*})? (\\S+)$`, "gm"));
  return [...series].reduce((sum, [, value]) => sum + Number(value), 0);
}

async function total(name, among = replicas) {
  const values = await Promise.all(among.map((replica) => metric(replica, name)));
  return values.reduce((sum, value) => sum + value, 0);
}

// running returns how many requests the replicas compute or queue.
export async function running(among = replicas) {
  return (await total("vllm:num_requests_running", among)) + (await total("vllm:num_requests_waiting", among));
}

// generated returns how many tokens the replicas have produced so far.
export function generated() {
  return total("vllm:generation_tokens_total");
}

// eventually waits until condition holds. The bound only keeps a broken run from hanging.
export async function eventually(condition, what, seconds = 60) {
  const deadline = Date.now() + seconds * 1000;
  while (!(await condition())) {
    assert.ok(Date.now() < deadline, `not within ${seconds} s: ${what}`);
    await sleep(100);
  }
}
