// tool_type: script
// executor: node_runtime
// version: 1.0.0
// description: Greet somebody
// parameters:
//   - {name: name, type: string, default: world, description: Who is greeted}
// needs: {}  # such as {read: [data], write: [out], hosts: [api.example.com]}

// `main` gets the parameters as one object; what it returns is the result.
export function main({ name }) {
  return { greeting: `hello ${name}` };
}
