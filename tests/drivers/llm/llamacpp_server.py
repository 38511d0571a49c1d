"""A llama.cpp server with a scripted model of 2 MB; run with the Python of `requirements/models`.

The model has one-hot embeddings, no attention, and a table of which piece follows which. Its last token is its state:
the chat template chooses its answer from the roles of the messages.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import xllamacpp
from gguf import GGUFWriter

CALL = '\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n'
SAY = ["It is ", "sunny", " in Bern."]
FOLLOWS = [
    ("<|act|>", "<tool_call>"),
    ("<tool_call>", CALL),
    (CALL, "</tool_call>"),
    ("</tool_call>", "<|im_end|>"),
    ("<|say|>", SAY[0]),
    (SAY[0], SAY[1]),
    (SAY[1], SAY[2]),
    (SAY[2], "<|im_end|>"),
]
TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Call as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if messages[-1].role == 'tool' or not tools %}<|say|>{% else %}<|act|>{% endif %}{% endif %}"""


def write_model(path: str) -> None:
    """Write the model."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for the 256 bytes
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    pieces = ["<tool_call>", "</tool_call>", CALL, *SAY]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|act|>", "<|say|>"]
    words = [letters[byte] for byte in range(256)] + ["th", *pieces, *special]
    size, at = -(-len(words) // 32) * 32, {word: number for number, word in enumerate(words)}
    after = np.zeros((len(words), size), np.float32)
    for before, then in FOLLOWS:
        after[at[then], at[before]] = 5
    file = GGUFWriter(path, "llama")
    file.add_context_length(16384)
    file.add_embedding_length(size)
    file.add_block_count(1)
    file.add_feed_forward_length(32)
    file.add_head_count(4)
    file.add_head_count_kv(4)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(size // 4)
    file.add_vocab_size(len(words))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("default")
    file.add_token_list(words)
    file.add_token_types([1] * 257 + [4] * len(pieces) + [3] * len(special))
    file.add_token_merges(["t h"])
    file.add_bos_token_id(at["<|endoftext|>"])
    file.add_eos_token_id(at["<|im_end|>"])
    file.add_add_bos_token(False)
    file.add_chat_template(TEMPLATE)
    ones, empty = np.ones(size, np.float32), {name: np.zeros((size, size), np.float32) for name in "qkv"}
    empty["output"] = np.zeros((size, size), np.float32)
    tensors = {
        "token_embd": np.eye(len(words), size, dtype=np.float32),
        "output": after,
        "output_norm": ones,
        "blk.0.attn_norm": ones,
        "blk.0.ffn_norm": ones,
        **{f"blk.0.attn_{name}": values for name, values in empty.items()},
        "blk.0.ffn_gate": np.zeros((32, size), np.float32),
        "blk.0.ffn_up": np.zeros((32, size), np.float32),
        "blk.0.ffn_down": np.zeros((size, 32), np.float32),
    }
    for name, values in tensors.items():
        file.add_tensor(f"{name}.weight", values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


if __name__ == "__main__":
    write_model(sys.argv[1])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.use_jinja = True
    parameters.warmup = False
    parameters.n_gpu_layers = 0
    parameters.port = 0
    parameters.sampling.temp = 0
    server = xllamacpp.Server(parameters)
    print(f"listening {server.listening_address}", flush=True)  # noqa: T201 - read by the test
    while sys.stdin.read(1):  # until the test closes it
        time.sleep(0)
