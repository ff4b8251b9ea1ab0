"""Twenty-four conversations that test chat templates, each with unique words in every message."""

from typing import Any

Record = dict[str, Any]
"""`messages`, and `tools` if there are any, in the format of `data/records.py`."""


def said(role: str, content: str = "", **fields: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **fields}


def called(*calls: tuple[str, dict[str, Any]], content: str = "", **fields: Any) -> dict[str, Any]:
    """A message of the assistant that calls tools: (name, arguments) each."""
    made = [
        {"id": f"id{number:07}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return said("assistant", content, tool_calls=made, **fields)


def answered(number: int, name: str, content: str) -> dict[str, Any]:
    """A tool's result for the call of this number."""
    return said("tool", content, tool_call_id=f"id{number:07}", name=name)


def tool(name: str, **properties: str) -> dict[str, Any]:
    """A tool whose parameters have these types."""
    given = {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": given, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Tells {name}.", "parameters": parameters}}


WEATHER, CLOCK = tool("get_weather", city="string"), tool("get_time", zone="string", digits="integer")
ASKED, TOLD = said("user", "What is two plus two?"), said("assistant", "Four, surely.")
AGAIN, TWICE = said("user", "And twice that much?"), said("assistant", "Eight then.\n\nAsk on!")
BRIEF = said("system", "Be brief and kind.")
RAINY = [
    said("user", "How is Oslo?"),
    called(("get_weather", {"city": "Oslo"})),
    answered(0, "get_weather", "rain, 7 C"),
]
THOUGHT = "They want a sum.\nTwo and two."

CONVERSATIONS: dict[str, Record] = {
    "one turn": {"messages": [ASKED, TOLD]},
    "two turns": {"messages": [ASKED, TOLD, AGAIN, TWICE]},
    "system": {"messages": [BRIEF, ASKED, TOLD, AGAIN, TWICE]},
    "empty system": {"messages": [said("system"), ASKED, TOLD]},
    "developer": {"messages": [said("developer", "Answer in verse."), ASKED, TOLD]},
    "long": {
        "messages": [
            said(role, f"{word} number {number}.")
            for number in range(40)
            for role, word in (("user", "Question"), ("assistant", "Reply"))
        ]
    },
    "long answer": {"messages": [ASKED, said("assistant", "All of it, word by word. " * 400 + "Done")]},
    "unicode": {"messages": [said("user", "¿Qué? 你好 🌍 مرحبا"), said("assistant", "Ça va… 好 🎉 שלום e\u0301")]},
    "white space": {"messages": [said("user", "\n  Where? \n"), said("assistant", "  Here,\n\n  there.  \n")]},
    "code": {
        "messages": [
            said("user", "Write a loop, {{ please }}"),
            said("assistant", "```c\nfor (;;) { x <<= 1; } // <b>&amp;</b> {% if %}\n```"),
        ]
    },
    "empty question": {"messages": [said("user"), TOLD]},
    "empty answer": {"messages": [ASKED, said("assistant"), AGAIN, TWICE]},
    "assistant first": {"messages": [said("assistant", "Good day, what is it?"), ASKED, TOLD]},
    "two answers in a row": {"messages": [ASKED, TOLD, said("assistant", "Or so I think.")]},
    "question last": {"messages": [ASKED, TOLD, AGAIN]},
    "thought": {"messages": [ASKED, said("assistant", "Four, surely.", reasoning_content=THOUGHT)]},
    "thoughts of two turns": {
        "messages": [
            ASKED,
            said("assistant", "Four, surely.", reasoning_content=THOUGHT),
            AGAIN,
            said("assistant", "Eight then.", reasoning_content="Twice four."),
        ]
    },
    "thought in the answer": {
        "messages": [ASKED, TOLD, AGAIN, said("assistant", "<think>\nTwice four.\n</think>\n\nEight then.")]
    },
    "call": {"messages": [*RAINY, said("assistant", "It rains there.")], "tools": [WEATHER, CLOCK]},
    "call last": {"messages": [ASKED, TOLD, *RAINY[:2]], "tools": [WEATHER]},
    "calls at once": {
        "messages": [
            said("user", "Compare Oslo and Rome."),
            called(("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})),
            answered(0, "get_weather", "rain, 7 C"),
            answered(1, "get_weather", "sun, 21 C"),
            said("assistant", "Rome is warmer."),
            AGAIN,
            TWICE,
        ],
        "tools": [WEATHER],
    },
    "calls in a row": {
        "messages": [
            BRIEF,
            *RAINY,
            called(("get_time", {"zone": 'Europe/"Oslo"', "digits": 2})),
            answered(0, "get_time", "12:30"),
            said("assistant", "Rain at half past twelve."),
        ],
        "tools": [WEATHER, CLOCK],
    },
    "call with words and a thought": {
        "messages": [
            said("user", "How late is it?"),
            called(
                ("get_time", {"zone": "Zürich é 🎿", "digits": 4}), content="Let me look.", reasoning_content="A clock!"
            ),
            answered(0, "get_time", "23:59"),
            said("assistant", "Nearly midnight.", reasoning_content="Close to twelve."),
        ],
        "tools": [CLOCK],
    },
    "tools not used": {"messages": [BRIEF, ASKED, TOLD, AGAIN, TWICE], "tools": [WEATHER, CLOCK]},
}
