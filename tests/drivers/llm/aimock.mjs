// Serves @copilotkit/aimock with the fixtures of tests/drivers/llm/test_aimock.py; prints its address.
import { pathToFileURL } from "node:url";

const { LLMock } = await import(pathToFileURL(process.argv[2]));
const mock = new LLMock({ port: 0, logLevel: "silent" });
const calls = [
  { name: "search", arguments: '{"query":"news"}' },
  { name: "help", arguments: "{}" },
];
const fixtures = [
  { match: { userMessage: "two calls", hasToolResult: false }, response: { toolCalls: calls } },
  { match: { userMessage: "two calls", hasToolResult: true }, response: { content: "It is sunny in Bern." } },
  { match: { userMessage: "rate limit", sequenceIndex: 0 }, response: { error: { message: "Too fast", type: "rate_limit_error" }, status: 429 } },
  { match: { userMessage: "rate limit" }, response: { content: "Now." } },
  { match: { userMessage: "cut off" }, response: { content: "A long answer that is cut off before it ends." }, chunkSize: 5, latency: 20, truncateAfterChunks: 8 },
  { match: { userMessage: "hello" }, response: { content: "Hello from aimock." } },
];
for (const fixture of fixtures) mock.addFixture(fixture);
await mock.start();
console.log(mock.url);
