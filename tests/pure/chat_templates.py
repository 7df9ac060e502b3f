"""Six shapes of chat templates as they are met in the wild, each beside what it should write, said in Python.

`write` gives the whole text as pieces, (text, whether the assistant says it), from the turns alone: it knows nothing of
how targets are found. `GEN` and `END` in a template are where generation blocks go, in the variant that has them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Piece = tuple[str, bool]
MARKERS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<think>", "</think>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    source: str
    write: Callable[[Sequence[dict[str, Any]]], list[Piece]]
    has_system: bool = True
    is_rewritten: Callable[[dict[str, Any]], bool] = lambda turn: False
    """Whether an assistant turn is not whole in the text once others follow."""

    def template(self, *, blocks: bool) -> str:
        gen, end = ("{% generation %}", "{% endgeneration %}") if blocks else ("", "")
        return self.source.replace("GEN", gen).replace("END", end)


def _chatml(turns: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = []
    for turn in turns:
        pieces += [
            (f"<|im_start|>{turn['role']}\n", False),
            *_said(turn, turn["content"] + "<|im_end|>"),
            ("\n", False),
        ]
    return pieces


def _said(turn: dict[str, Any], text: str) -> list[Piece]:
    return [(text, turn["role"] == "assistant")]


CHATML = Shape(
    name="ChatML",
    source="{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "GEN{{ m.content + '<|im_end|>' }}END{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    write=_chatml,
)


def _llama(turns: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = [("<s>", False)]
    for turn in turns:
        head = f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n"
        pieces += [(head, False), *_said(turn, turn["content"].strip() + "<|eot_id|>")]
    return pieces


LLAMA = Shape(
    name="Llama-3-like",
    source="{{- bos_token }}\n{%- for m in messages %}\n"
    "    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}\n"
    "    {%- if m.role == 'assistant' %}\nGEN{{- m.content | trim + '<|eot_id|>' }}END\n"
    "    {%- else %}\n        {{- m.content | trim + '<|eot_id|>' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n",
    write=_llama,
)


def _mistral(turns: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = [("<s>", False)]
    system = ""
    for turn in turns:
        if turn["role"] == "system":
            system = turn["content"] + "\n\n"
        elif turn["role"] == "user":
            pieces.append((f"[INST] {system}{turn['content']} [/INST]", False))
            system = ""
        else:
            pieces += [(" ", False), (turn["content"] + "</s>", True)]
    return pieces


MISTRAL = Shape(
    name="Mistral-like",
    source="{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' }}GEN{{ m.content + eos_token }}END{% endif %}{% endfor %}",
    write=_mistral,
)


def _zephyr(turns: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = []
    for turn in turns:
        pieces += [(f"<|{turn['role']}|>\n", False), *_said(turn, turn["content"] + "</s>"), ("\n", False)]
    return pieces


ZEPHYR = Shape(
    name="Zephyr-like",
    source="{% for m in messages %}\n{% if m.role == 'assistant' %}\n{{ '<|assistant|>\n' }}"
    "GEN{{ m.content + eos_token }}END{% else %}\n{{ '<|' + m.role + '|>\n' + m.content + eos_token }}{% endif %}"
    "{{ '\n' }}"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>\n' }}{% endif %}\n{% endfor %}",
    write=_zephyr,
)


def _thinking(turns: Sequence[dict[str, Any]]) -> list[Piece]:
    """Earlier turns without their thoughts; the last one with them, or with a mark that there are none."""
    pieces: list[Piece] = []
    for place, turn in enumerate(turns):
        content = turn["content"]
        if turn["role"] == "assistant":
            is_last = place + 1 == len(turns)
            if "</think>" in content and not is_last:
                content = content.split("</think>")[-1].lstrip("\n")
            elif "</think>" not in content and is_last:
                content = "<think>\n\n</think>\n\n" + content
        head = (f"<|im_start|>{turn['role']}\n", False)
        pieces += [head, *_said(turn, content + "<|im_end|>"), ("\n", False)]
    return pieces


THINKING = Shape(
    name="thinking, stripped from history",
    source="{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% if '</think>' in m.content and not loop.last %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% elif '</think>' not in m.content and loop.last %}{% set text = '<think>\n\n</think>\n\n' + m.content %}"
    "{% else %}{% set text = m.content %}{% endif %}"
    "GEN{{ text + '<|im_end|>' }}END{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    write=_thinking,
    is_rewritten=lambda turn: "</think>" in turn["content"],
)


def _tool_call(call: dict[str, Any]) -> str:
    said = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"


def _tools(turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[Piece]:
    pieces: list[Piece] = []
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        pieces.append((f"<|im_start|>system\nTools:{listed}<|im_end|>\n", False))
    for place, turn in enumerate(turns):
        if turn["role"] == "tool":
            opens = place == 0 or turns[place - 1]["role"] != "tool"
            closes = place + 1 == len(turns) or turns[place + 1]["role"] != "tool"
            text = f"\n<tool_response>\n{turn['content']}\n</tool_response>"
            pieces.append(("<|im_start|>user" * opens + text + "<|im_end|>\n" * closes, False))
            continue
        calls = [_tool_call(call) for call in turn.get("tool_calls", ())]
        text = "\n".join([turn["content"]] * bool(turn["content"] or not calls) + calls)
        pieces += [(f"<|im_start|>{turn['role']}\n", False), *_said(turn, text + "<|im_end|>"), ("\n", False)]
    return pieces


TOOLS = Shape(
    name="tools",
    source="{% if tools %}{{ '<|im_start|>system\nTools:' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}GEN{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}END{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    write=_tools,
)

SHAPES = (CHATML, LLAMA, MISTRAL, ZEPHYR, THINKING, TOOLS)
