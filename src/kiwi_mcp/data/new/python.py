"""
tool_type: script
executor: python_runtime
version: 1.0.0
description: Greet somebody  # what search finds it by
# config: {requires: [humanize==4.13.0]}  # packages, installed apart from your own Python
# needs: {read: [data], write: [out], hosts: [api.example.com]}  # what it may read, change and reach
"""


def main(name: str = "world", times: int = 1) -> dict[str, str]:
    # The parameters of `main` are those of the tool; what it returns is the result.
    return {"greeting": ", ".join([f"hello {name}"] * times)}
