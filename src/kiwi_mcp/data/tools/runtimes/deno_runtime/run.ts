// Runs one TypeScript or JavaScript file with parameters: `deno run run.ts FILE`, parameters as JSON on standard input.
//
// The first of these that the file exports is called with one object of parameters and may be async; what it returns
// is the result: `main`, the default export, `run`. A file that exports none of them is a plain script: it reads its
// parameters from standard input, and what it prints is the result.

type Call = (parameters: unknown) => unknown;

function encode(value: unknown): string {
  const text = JSON.stringify(value ?? null, (_key, each) => {
    if (typeof each === "number" && !Number.isFinite(each)) throw new TypeError(`${each} is not a JSON number`);
    if (typeof each === "bigint") throw new TypeError("a BigInt is not a JSON number");
    if (each instanceof Map) return Object.fromEntries(each);
    return each instanceof Set ? [...each] : each;
  });
  if (text === undefined) throw new TypeError(`a ${typeof value} is not JSON`);
  return text;
}

// The last line of what a tool says is what a caller reads first, so it names the error and not a frame of its stack.
function fail(error: unknown): never {
  const lines = String(error instanceof Error ? error.stack ?? error : error).split("\n");
  const own = lines.filter((line) => !line.includes(import.meta.url) && !line.includes("ext:"));
  console.error(own.join("\n"));
  if (own.length > 1) console.error(String(error));
  Deno.exit(1);
}

globalThis.addEventListener("error", (event) => fail(event.error));
globalThis.addEventListener("unhandledrejection", (event) => fail(event.reason));
const exported = await import(`file://${encodeURI(Deno.args[0]).replaceAll("#", "%23").replaceAll("?", "%3F")}`);
const call: Call | undefined = [exported.main, exported.default, exported.run]
  .find((each) => typeof each === "function");
if (call) {
  const input = await new Response(Deno.stdin.readable).text();
  const result = encode(await call(input.trim() ? JSON.parse(input) : {}));
  const channel = Deno.env.get("KIWI_RESULT");
  if (channel) Deno.writeTextFileSync(channel, result, { create: false });
  else console.log(result);
}
