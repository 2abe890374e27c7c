// The official npm package against a server whose answers are known: node openai_package.mjs BASE_URL
// What it throws ends the process with its stack; the last line says how many checks there were.

import assert from "node:assert/strict";
import { File } from "node:buffer";
import OpenAI, { toFile } from "openai";

globalThis.File ??= File; // node 18

const model = "bytes";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 20_000 });
const ask = (content) => ({ model, messages: [{ role: "user", content }] });
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const checks = {
  async "a chat, whole"() {
    const { data, response } = await client.chat.completions.create(ask("hi")).withResponse();
    assert.equal(data.choices[0].message.content, "Hello!");
    assert.equal(data.choices[0].finish_reason, "stop");
    assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + data.usage.completion_tokens);
    assert.ok(data._request_id);
    assert.equal(data._request_id, response.headers.get("x-request-id"));
  },

  async "a chat, streamed: the helper agrees with the whole"() {
    const stream = client.chat.completions.stream({ ...ask("hi"), stream_options: { include_usage: true } });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(text, "Hello!");
    assert.equal(final.choices[0].message.content, "Hello!");
    assert.ok(final.usage.completion_tokens > 0);
  },

  async "several choices in one stream"() {
    const stream = await client.chat.completions.create({ ...ask("hi"), n: 3, stream: true });
    const texts = ["", "", ""];
    for await (const chunk of stream) {
      for (const choice of chunk.choices) texts[choice.index] += choice.delta.content ?? "";
    }
    assert.deepEqual(texts, ["Hello!", "Hello!", "Hello!"]);
  },

  async "logprobs, whole and streamed, count the same tokens"() {
    const whole = await client.chat.completions.create({ ...ask("hi"), logprobs: true, top_logprobs: 2 });
    const stream = client.chat.completions.stream({ ...ask("hi"), logprobs: true, top_logprobs: 2 });
    const final = await stream.finalChatCompletion();
    assert.equal(whole.choices[0].logprobs.content.length, whole.usage.completion_tokens);
    assert.equal(final.choices[0].logprobs.content.length, whole.usage.completion_tokens);
  },

  async "a completion of ids and of several texts"() {
    const one = await client.completions.create({ model, prompt: [104, 105], max_tokens: 3 });
    assert.equal(one.choices[0].text, "Hel");
    const two = await client.completions.create({ model, prompt: ["a", "b"], echo: true });
    assert.deepEqual(two.choices.map((choice) => choice.text), ["aHello!", "bHello!"]);
  },

  async "a call, whole and streamed"() {
    const fields = { ...ask("weather"), tools, tool_choice: "required" };
    const whole = await client.chat.completions.create(fields);
    const final = await client.chat.completions.stream(fields).finalChatCompletion();
    for (const answer of [whole, final]) {
      assert.equal(answer.choices[0].finish_reason, "tool_calls");
      const [call] = answer.choices[0].message.tool_calls;
      assert.equal(call.function.name, "get_weather");
      assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    }
  },

  async "runTools goes round: a call, its result, an answer"() {
    const seen = [];
    const runner = client.chat.completions.runTools({
      ...ask("weather"),
      tools: [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: (args) => (seen.push(args), "sunny") } }],
    });
    assert.equal(await runner.finalContent(), "It is sunny.");
    assert.deepEqual(seen, [{ city: "Paris" }]);
  },

  async "parse reads a schema's answer"() {
    const schema = { type: "object", properties: { a: { type: "integer" } }, required: ["a"], additionalProperties: false };
    const response_format = { type: "json_schema", json_schema: { name: "x", strict: true, schema } };
    const answer = await client.chat.completions.parse({ ...ask("json"), response_format });
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), { a: 1 });
  },

  async "responses, whole and streamed"() {
    const whole = await client.responses.create({ model, input: "hi" });
    assert.equal(whole.output_text, "Hello!");
    const kinds = [];
    for await (const event of await client.responses.create({ model, input: "hi", stream: true })) kinds.push(event.type);
    assert.equal(kinds[0], "response.created");
    assert.equal(kinds.at(-1), "response.completed");
  },

  async "errors have their class, field and code"() {
    const bad = client.chat.completions.create({ ...ask("hi"), temperature: 9 });
    await assert.rejects(bad, (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.deepEqual([error.status, error.param, error.code], [400, "temperature", "invalid_value"]);
      assert.ok(error.requestID);
      return true;
    });
    await assert.rejects(client.models.retrieve("none"), OpenAI.NotFoundError);
    await assert.rejects(client.get("/nope"), OpenAI.NotFoundError);
  },

  async "a stream that breaks throws, and does not look whole"() {
    const read = async () => {
      for await (const chunk of await client.chat.completions.create({ ...ask("break"), stream: true })) assert.ok(chunk.id);
    };
    await assert.rejects(read, OpenAI.APIError);
  },

  async "a client that stops reading ends its request"() {
    const stream = await client.chat.completions.create({ ...ask("wait"), stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    assert.ok(stream.controller.signal.aborted);
  },

  async "models are listed and found"() {
    const ids = [];
    for await (const card of client.models.list()) ids.push(card.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async "a batch: upload, run, read the answers"() {
    const line = { custom_id: "a", method: "POST", url: "/v1/completions", body: { model, prompt: "hi" } };
    const file = await client.files.create({ purpose: "batch", file: await toFile(Buffer.from(JSON.stringify(line)), "in.jsonl") });
    const fields = { input_file_id: file.id, endpoint: "/v1/completions", completion_window: "24h" };
    let batch = await client.batches.create(fields);
    while (!["completed", "failed"].includes(batch.status)) batch = await client.batches.retrieve(batch.id);
    assert.equal(batch.status, "completed");
    const answer = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
    assert.equal(answer.response.body.choices[0].text, "Hello!");
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
  } catch (error) {
    console.error(`not so: ${name}`);
    throw error;
  }
}
console.log(`${Object.keys(checks).length} checks`);
