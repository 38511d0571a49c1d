// Runs one JavaScript file with parameters: `node run.mjs FILE`, parameters as JSON on standard input.
//
// The first of these that the file exports (as an ES module or as CommonJS) is called with one object of parameters
// and may be async; what it returns is the result: `main`, the default export, `run`. A file that exports none of them
// is a plain script: it reads its parameters from standard input, and what it prints is the result.

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const path = process.argv[2];
process.argv.splice(1, 1);

function toCall(exported) {
  const common = exported.default ?? {};
  const found = [exported.main, common.main, common, exported.run, common.run];
  return found.find((each) => typeof each === "function");
}

function encode(value) {
  const text = JSON.stringify(value ?? null, (key, each) => {
    if (typeof each === "number" && !Number.isFinite(each)) throw new TypeError(`${each} is not a JSON number`);
    if (typeof each === "bigint") throw new TypeError("a BigInt is not a JSON number");
    if (each instanceof Map) return Object.fromEntries(each);
    return each instanceof Set ? [...each] : each;
  });
  if (text === undefined) throw new TypeError(`a ${typeof value} is not JSON`);
  return text;
}

// The last line of what a tool says is what a caller reads first, so it names the error and not a frame of its stack.
function fail(error) {
  if (error instanceof SyntaxError) throw error; // only node itself knows the line
  const lines = String(error?.stack ?? error).split("\n");
  const own = lines.filter((line) => !line.includes(import.meta.url) && !line.includes("node:internal"));
  console.error(own.join("\n"));
  if (own.length > 1) console.error(String(error));
  process.exit(1);
}

process.on("uncaughtException", fail);
const call = toCall(await import(pathToFileURL(path)));
if (call) {
  const input = readFileSync(0, "utf8");
  const value = await call(input.trim() ? JSON.parse(input) : {});
  writeFileSync(process.env.KIWI_RESULT ?? 1, encode(value));
}
