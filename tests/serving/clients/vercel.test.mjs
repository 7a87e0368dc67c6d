// Vercel's AI SDK with its providers @ai-sdk/openai-compatible and @ai-sdk/openai: see launch/clients.sh.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { APICallError, Output, generateText, jsonSchema, streamText, tool } from 'ai';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { z } from 'zod';

const baseURL = `${process.env.L2D_SERVER}/v1`;
const apiKey = 'secret';
const question = [{ role: 'user', content: 'What is 12 * 4?' }];
const own = { seed: 1, temperature: 1, maxOutputTokens: 8, maxRetries: 0 };
const trip = z.object({ city: z.enum(['Oslo', 'Rome']), days: z.number().int().min(1).max(3) });
const tools = { book: tool({ description: 'Book a trip.', inputSchema: trip }) };

const compatible = createOpenAICompatible({
  name: 'l2d', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
// @ai-sdk/openai sends no field that it does not know: the address has the server's own.
const withFields = fields => createOpenAI({
  baseURL, apiKey, fetch: (url, options) => fetch(`${url}?${new URLSearchParams(fields)}`, options),
});
const openai = withFields({ budget: 3, seed: 1 });

async function post(route, body) {
  const headers = { Authorization: `Bearer ${apiKey}`, 'Content-Type': 'application/json' };
  const reply = await fetch(`${baseURL}/${route}`, { method: 'POST', headers, body: JSON.stringify(body) });
  return reply.json();
}

async function answer(messages, options = {}) {
  const body = { model: 'tiny', messages, max_tokens: 8, temperature: 1, seed: 1, ...options };
  return (await post('chat/completions', body)).choices[0].message.content;
}

async function evaluations() {
  const reply = await fetch(`${process.env.L2D_SERVER}/metrics`, { headers: { Authorization: `Bearer ${apiKey}` } });
  return Number((await reply.text()).match(/^l2d_evaluations_total (.+)$/m)[1]);
}

test('openai-compatible: a budget, a stream, two turns', async () => {
  const before = await evaluations();
  const model = compatible('tiny');
  const budget = { providerOptions: { l2d: { budget: 7 } } };
  const whole = await generateText({ model, messages: question, ...own, ...budget });
  assert.equal(await evaluations() - before, 56);
  assert.equal(whole.text, await answer(question, { budget: 7 }));
  assert.equal(whole.usage.outputTokens, 8);
  const stream = streamText({ model, messages: question, ...own });
  assert.equal(await stream.text, await answer(question));
  assert.equal((await stream.usage).outputTokens, 8);
  const turns = [...question, { role: 'assistant', content: '48' }, { role: 'user', content: 'And 5?' }];
  assert.equal((await generateText({ model, messages: turns, ...own })).text, await answer(turns));
  const effort = { providerOptions: { l2d: { reasoningEffort: 'medium' } } };
  assert.equal((await generateText({ model, messages: question, ...own, ...effort })).text, whole.text);
});

test('openai-compatible: an object', async () => {
  const { output } = await generateText({
    model: compatible('tiny'), messages: question, maxOutputTokens: 64, output: Output.object({ schema: trip }),
  });
  assert.deepEqual(trip.parse(output), output);
});

test('openai-compatible: an error', async () => {
  const asking = generateText({ model: compatible('tiny'), messages: question, ...own, temperature: -1 });
  await assert.rejects(asking, error => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature must be in \[0, 1000\]/);
    return true;
  });
});

for (const [name, model] of [['responses', openai('tiny')], ['chat', openai.chat('tiny')]]) {
  const asked = { model, messages: question, maxOutputTokens: 8, temperature: 1, maxRetries: 0 };
  test(`openai, ${name}: a stream, two turns, usage`, async () => {
    const whole = await generateText(asked);
    assert.equal(whole.text, await answer(question));
    assert.equal(whole.usage.outputTokens, 8);
    assert.equal(whole.finishReason, 'length');
    const stream = streamText(asked);
    assert.equal(await stream.text, whole.text);
    assert.equal((await stream.usage).outputTokens, 8);
    const messages = [...question, ...whole.response.messages, { role: 'user', content: 'And 5?' }];
    const second = await generateText({ ...asked, messages, providerOptions: { openai: { store: false } } });
    const told = [...question, { role: 'assistant', content: whole.text }, { role: 'user', content: 'And 5?' }];
    assert.equal(second.text, await answer(told));
  });

  test(`openai, ${name}: a budget in the address`, async () => {
    const before = await evaluations();
    const provider = withFields({ budget: 7 });
    await generateText({ ...asked, model: name === 'chat' ? provider.chat('tiny') : provider('tiny') });
    assert.equal(await evaluations() - before, 56);
  });

  test(`openai, ${name}: an object`, async () => {
    const { output } = await generateText({ ...asked, maxOutputTokens: 64, output: Output.object({ schema: trip }) });
    assert.deepEqual(trip.parse(output), output);
  });

  test(`openai, ${name}: log-probabilities`, async () => {
    const { providerMetadata } = await generateText({ ...asked, providerOptions: { openai: { logprobs: 2 } } });
    const scored = providerMetadata.openai.logprobs.flat();
    assert.equal(scored.length, 8);
  });

  test(`openai, ${name}: an error`, async () => {
    const asking = generateText({ ...asked, temperature: -1 });
    await assert.rejects(asking, error => APICallError.isInstance(error) && /temperature must be in/.test(error.message));
  });
}

for (const [name, model] of [['compatible', compatible('tiny')], ['responses', openai('tiny')], ['chat', openai.chat('tiny')]]) {
  test(`${name}: tools`, async () => {
    const providerOptions = { l2d: { parallel_tool_calls: false }, openai: { parallelToolCalls: false } };
    const settings = { maxOutputTokens: 128, maxRetries: 0, toolChoice: 'required', providerOptions };
    const asked = { model, messages: question, tools, ...settings };
    const { toolCalls } = await generateText(asked);
    assert.equal(toolCalls[0].toolName, 'book');
    assert.deepEqual(trip.parse(toolCalls[0].input), toolCalls[0].input);
    assert.deepEqual((await streamText(asked).toolCalls)[0].input, toolCalls[0].input);
  });
}

test('a schema of JSON', async () => {
  const schema = jsonSchema({
    type: 'object', properties: { x: { enum: [1, 22] } }, required: ['x'], additionalProperties: false,
  });
  const { output } = await generateText({
    model: compatible('tiny'), messages: question, maxOutputTokens: 64, output: Output.object({ schema }),
  });
  assert.ok([1, 22].includes(output.x));
});
