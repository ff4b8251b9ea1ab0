"""Small chat templates, each with one feature of published ones that makes an assistant's turn hard to locate."""

FAMILIES = {
    # Qwen3: thoughts before the last question are omitted, and the last answer gets an empty one.
    "forgets thoughts": """\
{%- if tools -%}{{- tools|tojson -}}{%- endif -%}
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
{{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content -}}
{%- for c in m.tool_calls -%}
{{- '<tool_call>\\n{"name": "' + c.function.name -}}
{{- '", "arguments": ' + c.function.arguments|tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""",
    # Qwen3 Thinking: the generation prompt opens a thought; answers of earlier turns have none.
    "prompts for a thought": """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
""",
    # Phi-3: an end-of-text token after the last turn, unless the assistant's turn is requested.
    "ends the text": """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
""",
    # gpt-oss: the last turn ends with another token.
    "two ends": """\
{%- for m in messages -%}
{{- '<|start|>' + m.role -}}
{%- if m.role == 'assistant' -%}{{- '<|channel|>final' -}}{%- endif -%}
{{- '<|message|>' + m.content -}}
{{- '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
""",
    # Gemma: different role names, and only alternating user and assistant.
    "takes turns": """\
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must take turns') -}}{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content|trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
""",
    # DeepSeek: calls only without content, with arguments as text.
    "bare calls": """\
{%- if tools -%}{{- tools|tojson -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}{%- endif -%}
{%- if m.role == 'tool' -%}{{- '<|out|>' + m.content + '<|outend|>' -}}{%- endif -%}
{%- if m.role == 'assistant' and m.content is undefined -%}
{%- for c in m.tool_calls -%}
{{- '<|assistant|>' + '<|call|>' + c.function.name + '\\n' + c.function.arguments + '<|callend|>' -}}
{%- endfor -%}
{{- '<|eos|>' -}}
{%- elif m.role == 'assistant' -%}
{{- ('<|assistant|>' if messages[loop.index0 - 1].role == 'user' else '') + m.content + '<|eos|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role == 'user' -%}{{- '<|assistant|>' -}}{%- endif -%}
""",
    # Mistral: calls have ids of nine characters, and tools precede the newest question.
    "ids": """\
{%- if tools -%}{{- tools|tojson -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '[INST]' + m.content + '[/INST]' -}}{%- endif -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- for c in m.tool_calls -%}
{%- if c.id is undefined or c.id|length != 9 -%}{{- raise_exception('ids have nine characters') -}}{%- endif -%}
{{- '[TOOL_CALLS]' + c.function.name + c.function.arguments|tojson + c.id -}}
{%- endfor -%}
{{- '</s>' -}}
{%- elif m.role == 'assistant' -%}{{- m.content + '</s>' -}}{%- endif -%}
{%- if m.role == 'tool' -%}{{- '[TOOL_RESULTS]' + m.tool_call_id + m.content + '[/TOOL_RESULTS]' -}}{%- endif -%}
{%- endfor -%}
""",
    # Llama 3.1: today's date.
    "tells the date": """\
{{- '<|begin_of_text|>' + strftime_now('%d %b %Y') + '<|eot_id|>' -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content|trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
""",
    # Cohere: two tokens end an answer, and the generation prompt opens a thought.
    "ends twice": """\
{%- for m in messages -%}
{{- '<|turn|><|' + m.role + '|>' + ('<|response|>' if m.role == 'assistant' else '') + m.content -}}
{{- ('<|endresponse|>' if m.role == 'assistant' else '') + '<|endturn|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|><|assistant|><|thought|>' -}}{%- endif -%}
""",
    # Metharme: only the next turn ends a turn; an end-of-text token ends the conversation.
    "no ends": """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>' + m.content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
""",
    # Several marked parts in a turn.
    "parts": """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
{%- if m.reasoning_content -%}
{% generation %}{{- '<think>' + m.reasoning_content + '</think>' -}}{% endgeneration %}
{%- endif -%}
{{- '\\n' -}}{% generation %}{{- m.content + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""",
}
