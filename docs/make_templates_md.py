"""Writes docs/templates.md, chat templates compared with transformers: `python docs/make_templates_md.py [FOLDER...]`.

Given folders of .jinja files (named after their source) it tries each template on the conversations of
`meshwright.testing.conversations` and writes docs/templates.json; it always writes the page from that. The repository
holds no template: files are identified by name and SHA-256.
"""

import argparse
import datetime
import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Tokenizer

from meshwright.data.chat import ChatTemplate
from meshwright.data.examples import RecordEncoder
from meshwright.data.tokenizer import TextTokenizer, train_tokenizer
from meshwright.spec.data import ChatSpec
from meshwright.spec.errors import UserError
from meshwright.testing.conversations import CONVERSATIONS, Record

DOCS = Path(__file__).parent
PAGE, DATA = DOCS / "templates.md", DOCS / "templates.json"
SPECIAL = re.compile(
    r"<\|[^<>|{}\s'\"]{1,40}\|>|<｜[^<>{}\s'\"]{1,40}｜>|\[/?[A-Z_]{3,25}\]|</?(?:s|bos|eos|turn|start_of_\w+|end_of_\w+)>"
    r"|<\|\w+>|<\w+\|>|<seed:\w+>|\[e~\[|\]~!?b[\[\]]"
)
"""Text in a template that becomes a special token of its tokenizer."""
HEADER = re.compile(r"start_header_id|im_start|start_of_turn|start_of_role|<\|user|<\|assistant")
MARKS = re.compile(r"{%-?\s*generation\s*-?%}")
REASONS = {
    "omits thoughts": "does not support thoughts, or omits them",
    "omits the record's tools": "does not support tools",
    "omits the tool calls": "omits tool calls",
    "omits a message of role": "omits messages of some role",
    "changes or omits parts of an assistant's turn": "has turns that cannot be located",
    "rejects this conversation": "rejects messages in this form",
}


class Day(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Day":
        """The recipe's default day."""
        return cls.fromisoformat(ChatSpec().date)


def tokenizer_of(source: str, base: bytes) -> TextTokenizer:
    """A small tokenizer that has the template's special tokens."""
    tokenizer = Tokenizer.from_str(base.decode())
    tokenizer.add_special_tokens(list(dict.fromkeys(["<s>", "</s>", *SPECIAL.findall(source)])))
    tokenizer.add_tokens([tag for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>") if tag in source])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return TextTokenizer({**files, "chat_template.jinja": source.encode()}, where="test")


def outcome(source: str, record: Record, template: ChatTemplate, tokenizer: TextTokenizer, theirs: Any) -> str:
    """equal, refused by both, a reason to refuse, or what is wrong."""
    encoder = RecordEncoder(tokenizer, template, ChatSpec(), 10**6)
    (found,) = encoder.encode([json.dumps({"given": 0, **record})])
    try:
        wanted = theirs.apply_chat_template(
            template.prepared(record["messages"]), tools=record.get("tools"), tokenize=True, return_dict=True
        )["input_ids"]
    except Exception:  # whatever a template raises
        wanted = None
    if found.error:
        reason = next((known for text, known in REASONS.items() if text in found.error), found.error)
        return f"refused: {reason}" if wanted is not None else "refused by both"
    (ids,) = found.documents
    if wanted != [int(number) if number >= 0 else ~int(number) for number in ids]:
        return "WRONG: other tokens"
    return _trained_wrong(source, record, _runs(tokenizer, ids.tolist())) or "equal"


def _trained_wrong(source: str, record: Record, runs: list[str]) -> str:
    """What is wrong with the decoded text of the runs of trained tokens, held against the conversation."""
    text = re.sub(r"\n+", "\n", "\n".join(runs))
    place = 0
    for message in record["messages"]:
        content = re.sub(r"\n+", "\n", message["content"].split("</think>")[-1].strip())
        if message["role"] != "assistant":
            if content and content in text:
                return f"WRONG: trains {content!r}"
            continue
        place = text.find(content, place)
        if place < 0:
            return f"WRONG: does not train {content!r}"
        for call in message.get("tool_calls", []):
            words = [call["function"]["name"], *call["function"]["arguments"]]
            if not all(word in text for word in words):
                return f"WRONG: does not train the call {words}"
    if not MARKS.search(source) and any(HEADER.search(run[1:]) for run in runs):
        return "WRONG: trains a header"
    return ""


def _runs(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    runs: list[list[int]] = []
    before = False
    for number in ids:
        if number >= 0 and not before:
            runs.append([])
        if number >= 0:
            runs[-1].append(number)
        before = number >= 0
    return [tokenizer.decode(run) for run in runs]


def measure(folders: list[Path]) -> list[dict[str, Any]]:
    """One row for each template of the folders that differs from those before."""
    import transformers  # slow to load, and needed here alone

    texts = [message["content"] for record in CONVERSATIONS.values() for message in record["messages"]]
    base, seen, rows = train_tokenizer(texts, 400).files["tokenizer.json"], set[str](), []
    for path in sorted(path for folder in folders for path in folder.glob("*.jinja")):
        source = path.read_text()
        if source in seen:
            continue
        seen.add(source)
        tokenizer = tokenizer_of(source, base)
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        row: dict[str, Any] = {"from": path.parent.name, "name": path.stem, "sha256": digest}
        try:
            template = ChatTemplate(source, tokenizer, name="it")
        except UserError as error:
            found = dict.fromkeys(CONVERSATIONS, f"refused: {error}")
        else:
            with mock.patch("transformers.utils.chat_template_utils.datetime", Day):
                found = {
                    name: outcome(source, record, template, tokenizer, theirs) for name, record in CONVERSATIONS.items()
                }
        rows.append({**row, "outcomes": dict(Counter(found.values()))})
        print(path.parent.name, path.stem, rows[-1]["outcomes"], flush=True)
    return rows


def page() -> str:
    """The page, from what was measured."""
    return "\n".join(_lines(json.loads(DATA.read_text()))) + "\n"


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["outcomes"])
    wrong = sum(count for text, count in total.items() if text.startswith("WRONG"))
    alone = total.total() - total["equal"] - total["refused by both"] - wrong
    yield f"""# Chat templates compared with transformers

<!-- made by docs/make_templates_md.py -->

{len(rows)} published chat templates were tried, each on {len(CONVERSATIONS)} conversations with tools, thoughts, system
messages, empty and long texts, and Unicode (`src/meshwright/testing/conversations.py`).

| result | meaning |
|---|---|
| equal | the tokens equal those of transformers' `apply_chat_template` on the same messages, in the format that the \
template expects; and the trained tokens, decoded, contain every answer and every call of the assistant, no text of \
other messages and no turn header |
| both refuse | transformers refuses the conversation too |
| refused | only Meshwright refuses it, with a reason: content would be omitted, or turns could not be located |
| wrong | none of these |

Of {total.total()} conversations {total["equal"]} are equal, {total["refused by both"]} are refused by both, {alone}
only by Meshwright, and {wrong} are wrong.

| refused only by Meshwright, because the template | conversations |
|---|---|"""
    for text, count in total.most_common():
        if text.startswith("refused: "):
            yield f"| {text.removeprefix('refused: ')} | {count} |"
    yield from (
        "",
        "The templates come from the packages trl, axolotl and llama-cpp-python (llama.cpp's), from unsloth, and from",
        "chujiezheng/chat_templates. None is part of this project; each is identified by its SHA-256.",
        "",
        "| from | template | SHA-256 | equal | both refuse | refused | wrong |",
        "|---|---|---|---|---|---|---|",
    )
    for row in rows:
        found = Counter(row["outcomes"])
        equal, both = found["equal"], found["refused by both"]
        bad = sum(count for text, count in found.items() if text.startswith("WRONG"))
        cells = (row["from"], row["name"], f"`{row['sha256']}`", equal, both, found.total() - equal - both - bad, bad)
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("folders", type=Path, nargs="*", help="models' directories: measure anew first")
    if folders := words.parse_args().folders:
        DATA.write_text(json.dumps(measure(folders), indent=1) + "\n")
    PAGE.write_text(page())
