"""The verb `chat`: chat with a trained model in the terminal."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.cli.common import (
    SAMPLING,
    add_model_arguments,
    add_sampling_arguments,
    compile_steps,
    open_model,
    positive,
    sampling_settings,
)
from meshwright.cli.ranks import degree_of, follows, started
from meshwright.spec.errors import UserError
from meshwright.spec.problems import did_you_mean
from meshwright.terminal import printable

COMMANDS = {
    "/help": "list the commands",
    "/undo": "remove the last question and its answer",
    "/clear": "start a new conversation",
    "/more": "continue the last text (of a model without a chat template)",
    "/system": "TEXT: set the system message; without TEXT, remove it",
    "/set": "NAME VALUE: change a setting; without arguments, show all",
    "/save": "FILE: append the conversation to a file as a training record (a line of JSON)",
    "/quit": "quit, as Ctrl-D does",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `chat`."""
    add_model_arguments(parser, compiles=True)
    parser.add_argument("--compare", metavar="OTHER", type=Path, help="a second model that answers every question too")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens", metavar="N", type=positive, help="longest answer (default 512, or the rest of the context)"
    )
    add_sampling_arguments(parser)
    commands = "\n".join(f"  {name:<9} {what}" for name, what in COMMANDS.items())
    parser.epilog = (
        f"commands:\n{commands}\n\n"
        "Ctrl-C stops an answer. Standard input may be a file or a pipe: each line is a question.\n\n"
        "examples:\n"
        "  meshwright chat runs/tuned --system 'Answer in one sentence.'\n"
        "  meshwright chat runs/tuned --compare runs/base --temperature 0"
    )


def run(arguments: argparse.Namespace) -> int:
    """Chat until the input ends."""
    if (status := started(arguments)) is not None:
        return status
    if arguments.compare and degree_of(arguments) > 1:
        raise UserError("--compare: layout.tp supports only one model; leave layout.tp out")
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.chat import Partner

    paths = [arguments.model, *([arguments.compare] if arguments.compare else [])]
    opened = [open_model(arguments, path) for path in paths]
    if follows(arguments, opened[0].model):
        return 0
    compile_steps(arguments, *(trained.model for trained in opened))
    partners = [
        Partner(trained, label, arguments.system)
        for trained, label in zip(opened, labels([trained.source for trained in opened]), strict=True)
    ]
    values = {**sampling_settings(arguments), "max_tokens": arguments.max_tokens}
    talk = Talk(partners, values, arguments.stop)
    if arguments.system and not any(partner.chats for partner in partners):
        raise UserError("--system needs a chat template, and the model has none")
    for partner in partners:
        talk.note(*partner.about())
    talk.note("/help lists the commands" if sys.stdin.isatty() else "")
    return talk.run(questions())


def labels(sources: list[Path]) -> list[str]:
    """Distinct short names: the folders' names, with parent folders where needed."""
    for length in range(1, max(len(source.parts) for source in sources) + 1):
        names = ["/".join(source.parts[-length:]) for source in sources]
        if len(set(names)) == len(names):
            return names
    return [f"{source} ({number})" for number, source in enumerate(sources, 1)]


def questions() -> Iterator[str]:
    """Lines of standard input: typed at a `> ` prompt, or from a file or a pipe."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    import readline  # noqa: F401  # line editing and history

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


class Talk:
    """A conversation in a terminal."""

    def __init__(self, partners: list[Any], values: dict[str, Any], stops: list[str]) -> None:
        self.partners, self.values, self.stops = partners, values, stops
        self.settings()  # refuses invalid values before the first question
        self.status = 0

    def settings(self) -> Any:
        """The settings as the engine's object. Raises `UserError` if one is invalid."""
        from meshwright.models.generate import Sampling
        from meshwright.serve.trained import Settings

        sampling = Sampling(**{name: self.values[name] for name in SAMPLING})
        return Settings(sampling=sampling, max_tokens=self.values["max_tokens"], stops=self.stops)

    def run(self, lines: Iterator[str]) -> int:
        """Answer every line, and return the exit status."""
        for line in lines:
            try:
                if line.strip() == "/quit":
                    break
                if line.startswith("/"):
                    self.command(*line.strip().partition(" ")[::2])
                elif line.strip():
                    self.answer(lambda partner, line=line: partner.say(line, self.settings()))
            except (UserError, OSError) as error:
                print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
                self.status = 0 if sys.stdin.isatty() else 2
        return self.status

    def answer(self, parts_of: Callable[[Any], Iterator[str]]) -> None:
        """Print each partner's answer as it is generated."""
        for partner in self.partners:
            if len(self.partners) > 1:
                print(f"--- {partner.label}")
            parts = parts_of(partner)
            try:
                for part in parts:
                    print(part, end="", flush=True)
                print(flush=True)
            except KeyboardInterrupt:
                print(" [interrupted]", flush=True)
            finally:
                parts.close()  # type: ignore[attr-defined]

    def command(self, name: str, rest: str) -> None:
        """Run a command: a line that begins with a slash."""
        rest = rest.strip()
        if name == "/help":
            self.note(*(f"{command:<9} {what}" for command, what in COMMANDS.items()))
        elif name == "/undo":
            self.undo()
        elif name == "/clear":
            for partner in self.partners:
                partner.turns.clear()
            self.note("a new conversation")
        elif name == "/more":
            self.answer(lambda partner: partner.more(self.settings()))
        elif name == "/system":
            for partner in self.partners:
                partner.system = rest or None
            self.note(f"system message: {rest}" if rest else "no system message")
        elif name == "/set":
            self.set(rest)
        elif name == "/save":
            self.save(rest)
        else:
            raise UserError(f"unknown command '{name}'{did_you_mean(name, list(COMMANDS))}; /help lists all")

    def undo(self) -> None:
        """Remove the last turn."""
        turns = [partner.turns.pop() for partner in self.partners if partner.turns]
        if not turns:
            raise UserError("no question to undo")
        self.note(f"removed: {turns[0].question}")

    def set(self, words: str) -> None:
        """Change a setting, or show all."""
        name, _, value = words.partition(" ")
        name = name.replace("-", "_")
        if not words:
            self.note(*(f"{key} {'auto' if value is None else value}" for key, value in self.values.items()))
            return
        if name not in self.values:
            raise UserError(f"/set {name}: unknown setting; the settings are {', '.join(self.values)}")
        before, whole = self.values[name], name in ("top_k", "seed", "max_tokens")
        try:
            self.values[name] = int(value) if whole else float(value)
            self.settings()
        except ValueError as error:
            self.values[name] = before
            is_ours = isinstance(error, UserError)
            wrong = str(error) if is_ours else f"'{value}' is not {'an integer' if whole else 'a number'}"
            raise UserError(f"/set {name}: {wrong}") from error
        self.note(f"{name} {self.values[name]}")

    def save(self, file: str) -> None:
        """Append the conversation of each partner to a file."""
        if not file:
            raise UserError("/save needs a file, as in /save talk.jsonl")
        if not file.endswith(".jsonl"):  # this line may come from an untrusted file, like questions
            raise UserError(f"/save {file}: the name must end in .jsonl")
        if not any(partner.turns for partner in self.partners):
            raise UserError("nothing to save yet")
        with Path(file).open("a", encoding="utf-8") as stream:
            for partner in self.partners:
                stream.write(json.dumps(partner.record(), ensure_ascii=False) + "\n")
        self.note(f"saved to {file}")

    def note(self, *lines: str) -> None:
        """Print lines that are not answers to standard error."""
        for line in filter(None, lines):
            print(printable(line), file=sys.stderr, flush=True)
