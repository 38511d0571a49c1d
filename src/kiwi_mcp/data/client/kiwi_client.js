// Calls items from inside a Node tool, which names them under `needs: {items: [...]}` of its manifest.
//
//   const { call } = require(`${process.env.KIWI_CLIENT}/kiwi_client.js`)
//   const price = call("price_of", { article: "tea" })
const fs = require("fs")

function call(item, parameters = {}) {
  const calls = Number(process.env.KIWI_CALLS)
  fs.writeSync(calls, JSON.stringify({ item, parameters }) + "\n")
  const parts = []
  const part = Buffer.alloc(65536)
  for (;;) {
    const size = fs.readSync(calls, part, 0, part.length, null)
    if (size === 0) throw new Error("unavailable: there was no answer")
    parts.push(Buffer.from(part.subarray(0, size)))
    if (part[size - 1] === 10) break
  }
  const answer = JSON.parse(Buffer.concat(parts).toString("utf8"))
  if (answer.error) throw Object.assign(new Error(`${answer.error}: ${answer.message}`), { code: answer.error })
  return answer.result
}

module.exports = { call }
