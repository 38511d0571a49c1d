# tool_type: script
# executor: bash_runtime
# version: 1.0.0
# description: Greet somebody
# parameters:
#   - {name: name, type: string, default: world, description: Who is greeted}
# needs: {}  # such as {read: [data], write: [out], hosts: [api.example.com]}

# A parameter is a variable that begins with KIWI_PARAM_; what is printed is the result.
echo "hello $KIWI_PARAM_name"
