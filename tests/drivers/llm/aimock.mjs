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
  { match: { userMessage: "cut off" }, response: { content: "A long answer that is cut off before it ends." }, chunkSize: 5, latency: 20, truncateAfterChunks: 8 },
  { match: { userMessage: "hello" }, response: { content: "Hello from aimock." } },
];
for (const dialect of ["openai_chat", "openai_responses", "anthropic", "gemini", "ollama"]) {
  const userMessage = `rate limit ${dialect}`;
  const response = { error: { message: "Too fast", type: "rate_limit_error" }, status: 429 };
  fixtures.push({ match: { userMessage, sequenceIndex: 0 }, response }, { match: { userMessage }, response: { content: "Now." } });
}
for (const fixture of fixtures) mock.addFixture(fixture);
await mock.start();
console.log(mock.url);
