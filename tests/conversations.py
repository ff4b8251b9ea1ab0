"""A tokenizer with chat tokens and a few conversations, for tests."""

import json

from tokenizers import Tokenizer

from meshwright.data.tokenizer import TextTokenizer, train_tokenizer

TALKS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {i} plus {i}?"},
        {"role": "assistant", "content": f"It is {2 * i}.\n\nAsk on, é!"},
        {"role": "user", "content": "And twice that?"},
        {"role": "assistant", "content": f"That is {4 * i}, of course."},
    ]
    for i in range(40)
]

CHATML = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}{% generation %}{{- message.content + '<|im_end|>' -}}{% endgeneration %}{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""A tokenizer's own template, with the assistant's turns marked."""


def chat_tokenizer(template: str | None = CHATML) -> TextTokenizer:
    """A small byte-level BPE with ChatML's and Llama 3's tokens."""
    trained = train_tokenizer([message["content"] for talk in TALKS for message in talk], 300)
    tokenizer = Tokenizer.from_str(trained.files["tokenizer.json"].decode())
    names = ("im_start", "im_end", "begin_of_text", "start_header_id", "end_header_id", "eot_id")
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|begin_of_text|>"}
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return TextTokenizer(files, where="test")


def lines(*records: object) -> str:
    """A .jsonl file's text."""
    return "".join(json.dumps(record) + "\n" for record in records)
