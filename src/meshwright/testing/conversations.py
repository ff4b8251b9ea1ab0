"""Twenty-four conversations that test chat templates, each with unique words in every message."""

from typing import Any

Record = dict[str, Any]
"""`messages`, and `tools` if there are any, in the format of `data/records.py`."""


def turn(role: str, content: str = "", **fields: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **fields}


def called(*calls: tuple[str, dict[str, Any]], content: str = "", **fields: Any) -> dict[str, Any]:
    """A message of the assistant that calls tools: (name, arguments) each."""
    made = [
        {"id": f"id{number:07}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return turn("assistant", content, tool_calls=made, **fields)


def answered(number: int, name: str, content: str) -> dict[str, Any]:
    """A tool's result for the call of this number."""
    return turn("tool", content, tool_call_id=f"id{number:07}", name=name)


def tool(name: str, **properties: str) -> dict[str, Any]:
    """A tool whose parameters have these types."""
    given = {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": given, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Tells {name}.", "parameters": parameters}}


WEATHER, CLOCK = tool("get_weather", city="string"), tool("get_time", zone="string", digits="integer")
QUESTION, ANSWER = turn("user", "What is two plus two?"), turn("assistant", "Four, surely.")
AGAIN, TWICE = turn("user", "And twice that much?"), turn("assistant", "Eight then.\n\nAsk on!")
BRIEF = turn("system", "Be brief and kind.")
RAINY = [
    turn("user", "How is Oslo?"),
    called(("get_weather", {"city": "Oslo"})),
    answered(0, "get_weather", "rain, 7 C"),
]
THOUGHT = "They want a sum.\nTwo and two."

CONVERSATIONS: dict[str, Record] = {
    "one turn": {"messages": [QUESTION, ANSWER]},
    "two turns": {"messages": [QUESTION, ANSWER, AGAIN, TWICE]},
    "system": {"messages": [BRIEF, QUESTION, ANSWER, AGAIN, TWICE]},
    "empty system": {"messages": [turn("system"), QUESTION, ANSWER]},
    "developer": {"messages": [turn("developer", "Answer in verse."), QUESTION, ANSWER]},
    "long": {
        "messages": [
            turn(role, f"{word} number {number}.")
            for number in range(40)
            for role, word in (("user", "Question"), ("assistant", "Reply"))
        ]
    },
    "long answer": {"messages": [QUESTION, turn("assistant", "All of it, word by word. " * 400 + "Done")]},
    "unicode": {"messages": [turn("user", "¿Qué? 你好 🌍 مرحبا"), turn("assistant", "Ça va… 好 🎉 שלום e\u0301")]},
    "white space": {"messages": [turn("user", "\n  Where? \n"), turn("assistant", "  Here,\n\n  there.  \n")]},
    "code": {
        "messages": [
            turn("user", "Write a loop, {{ please }}"),
            turn("assistant", "```c\nfor (;;) { x <<= 1; } // <b>&amp;</b> {% if %}\n```"),
        ]
    },
    "empty question": {"messages": [turn("user"), ANSWER]},
    "empty answer": {"messages": [QUESTION, turn("assistant"), AGAIN, TWICE]},
    "assistant first": {"messages": [turn("assistant", "Good day, what is it?"), QUESTION, ANSWER]},
    "two answers in a row": {"messages": [QUESTION, ANSWER, turn("assistant", "Or so I think.")]},
    "question last": {"messages": [QUESTION, ANSWER, AGAIN]},
    "thought": {"messages": [QUESTION, turn("assistant", "Four, surely.", reasoning_content=THOUGHT)]},
    "thoughts of two turns": {
        "messages": [
            QUESTION,
            turn("assistant", "Four, surely.", reasoning_content=THOUGHT),
            AGAIN,
            turn("assistant", "Eight then.", reasoning_content="Twice four."),
        ]
    },
    "thought in the answer": {
        "messages": [QUESTION, ANSWER, AGAIN, turn("assistant", "<think>\nTwice four.\n</think>\n\nEight then.")]
    },
    "call": {"messages": [*RAINY, turn("assistant", "It rains there.")], "tools": [WEATHER, CLOCK]},
    "call last": {"messages": [QUESTION, ANSWER, *RAINY[:2]], "tools": [WEATHER]},
    "calls at once": {
        "messages": [
            turn("user", "Compare Oslo and Rome."),
            called(("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})),
            answered(0, "get_weather", "rain, 7 C"),
            answered(1, "get_weather", "sun, 21 C"),
            turn("assistant", "Rome is warmer."),
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
            turn("assistant", "Rain at half past twelve."),
        ],
        "tools": [WEATHER, CLOCK],
    },
    "call with words and a thought": {
        "messages": [
            turn("user", "How late is it?"),
            called(
                ("get_time", {"zone": "Zürich é 🎿", "digits": 4}), content="Let me look.", reasoning_content="A clock!"
            ),
            answered(0, "get_time", "23:59"),
            turn("assistant", "Nearly midnight.", reasoning_content="Close to twelve."),
        ],
        "tools": [CLOCK],
    },
    "tools not used": {"messages": [BRIEF, QUESTION, ANSWER, AGAIN, TWICE], "tools": [WEATHER, CLOCK]},
}
