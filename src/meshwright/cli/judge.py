"""The verb `judge`: compares models' answers by a judge behind OpenAI's API, or by people's votes."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.cli.common import add_page_argument, check_page_name, positive, write_page
from meshwright.cli.output import add_json_argument, print_result, progress_on_stderr
from meshwright.cli.serve import check_key, read_key
from meshwright.judge.client import Client
from meshwright.judge.prompts import read_prompts
from meshwright.judge.questions import JudgeQuestion, ModelAnswers, answer_record, read_answers, read_questions
from meshwright.judge.ratings import Rated, Verdict, mean_ratings, ratings, read_verdicts, settled, versus
from meshwright.judge.run import (
    TokensUsed,
    VerdictJournal,
    estimate,
    items_of,
    judge_all,
    single_ratings,
    unclear,
    verdicts_of,
)
from meshwright.pages.scores import judge_page
from meshwright.spec.errors import UserError
from meshwright.storage.durable import write_durably

KEY = "OPENAI_API_KEY"
"""The environment variable that holds the API key, as for OpenAI's own clients."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `judge`."""
    parser.add_argument("questions", metavar="QUESTIONS", type=Path, nargs="?", help=".jsonl file: question, or turns")
    parser.add_argument(
        "--answers",
        metavar="A",
        nargs="+",
        default=[],
        help=".jsonl files of answers, or models that answer first (runs, checkpoints, Hugging Face directories); "
        "NAME=A names one",
    )
    parser.add_argument("--judge", metavar="URL", help="the judge's API, such as http://localhost:8000/v1")
    parser.add_argument("--judge-model", metavar="NAME", help="the judge's name there (default: its only model)")
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help=f"the judge's API key (default: ${KEY})")
    parser.add_argument(
        "--mode", choices=["pairwise", "single"], default="pairwise", help="compare two answers, or rate each (1 to 10)"
    )
    parser.add_argument("--votes", metavar="FILE", type=Path, nargs="+", default=[], help="also count these votes")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("judged"), help="default: judged")
    parser.add_argument("--prompts", metavar="DIR", type=Path, help="your own pairwise.txt, single.txt, reference.txt")
    parser.add_argument("--limit", metavar="N", type=positive, help="only the first N questions")
    parser.add_argument(
        "--max-tokens", metavar="N", type=positive, default=1024, help="tokens per reply (default 1024)"
    )
    parser.add_argument("--at-once", metavar="N", type=positive, default=8, help="concurrent requests (default 8)")
    parser.add_argument(
        "--price",
        metavar=("READ", "WRITTEN"),
        type=float,
        nargs=2,
        help="prices of a million tokens that the judge reads and of a million that it writes",
    )
    parser.add_argument("--dry-run", action="store_true", help="only estimate the cost; nothing is sent")
    parser.add_argument(
        "--device", metavar="D", default="auto", help="device of the models that answer (default: auto)"
    )
    add_page_argument(parser, "ratings with their intervals, and wins, ties and losses,")
    add_json_argument(parser)
    parser.epilog = (
        "examples:\n"
        "  meshwright judge questions.jsonl --answers runs/base runs/tuned --judge http://localhost:8000/v1\n"
        "  meshwright judge questions.jsonl --answers a.jsonl b.jsonl --judge URL --judge-model NAME --price 2.5 10\n"
        "  meshwright judge --votes votes.jsonl"
    )


def run(arguments: argparse.Namespace) -> int:
    """Judge the answers without a verdict, and print the comparison."""
    if arguments.html:
        check_page_name(arguments.html)
        if arguments.dry_run:
            raise UserError("--html: --dry-run judges nothing; leave one of the two out")
    questions = [] if arguments.questions is None else read_questions(arguments.questions, arguments.limit)
    if not questions and not arguments.votes:
        raise UserError("nothing to judge; give QUESTIONS with --answers and --judge, or --votes")
    report: dict[str, Any] = {}
    votes = read_verdicts(arguments.votes)
    verdicts: list[Verdict] = []
    rated: list[Rated] = []
    with progress_on_stderr(arguments.json):
        if questions:
            verdicts, rated = _judge(arguments, questions, report)
    if "estimate" not in report:
        report |= _compared(votes + verdicts, rated)
        categories = {question.id: question.category for question in questions}
        for title, group_of in (
            ("by_turn", lambda one: str(one.turn)),
            ("by_category", lambda one: categories[one.question]),
        ):
            groups = list(dict.fromkeys(map(group_of, [*verdicts, *rated])))
            if len(groups) > 1:
                report[title] = {
                    group: _compared(
                        [one for one in verdicts if group_of(one) == group],
                        [one for one in rated if group_of(one) == group],
                    )
                    for group in groups
                }
        if questions:
            write_durably(arguments.out / "report.json", json.dumps(report, indent=2) + "\n")
    print_result(arguments, report, _lines(report))
    if arguments.html:
        write_page(arguments.html, judge_page(report, list(_lines(report))))
    return 0


def _compared(verdicts: Sequence[Verdict], rated: Sequence[Rated]) -> dict[str, Any]:
    """The figures of some verdicts and ratings, as data."""
    figures: dict[str, Any] = {}
    if verdicts:
        agreed = settled(verdicts)
        figures["pairs"] = [asdict(one) for one in versus(agreed)]
        figures["ratings"] = {name: asdict(one) for name, one in ratings(agreed).items()}
    if rated:
        figures["mean_ratings"] = {name: asdict(one) for name, one in mean_ratings(rated).items()}
    return figures


def _judge(
    arguments: argparse.Namespace, questions: Sequence[JudgeQuestion], report: dict[str, Any]
) -> tuple[list[Verdict], list[Rated]]:
    """Judge, record the cost in `found`, and return the verdicts on pairs and the ratings."""
    if not arguments.answers or (arguments.judge is None and not arguments.dry_run):
        raise UserError("give the answers with --answers, and the judge's address with --judge")
    prompts = read_prompts(arguments.prompts)
    arguments.out.mkdir(parents=True, exist_ok=True)
    items = items_of(questions, _answers(arguments, questions), arguments.mode, prompts)
    if arguments.dry_run:
        spent = estimate(
            items, VerdictJournal(arguments.out / "verdicts.jsonl", arguments.judge_model or ""), arguments.max_tokens
        )
        report["estimate"] = _figures(spent, arguments)
        return [], []
    given = os.environ.get(KEY, "").strip()
    key = read_key(arguments.api_key_file) or (check_key(given, f"${KEY}") if given else None)
    client = Client(str(arguments.judge), arguments.judge_model, key=key)
    journal = VerdictJournal(arguments.out / "verdicts.jsonl", client.model)
    for name, text in prompts.texts.items():
        (arguments.out / "prompts").mkdir(exist_ok=True)
        write_durably(arguments.out / "prompts" / f"{name}.txt", text)
    shown = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if shown:
            print(f"\rjudged {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    spent = judge_all(
        items,
        journal,
        lambda prompt: client.ask(prompt, max_tokens=arguments.max_tokens),
        at_once=arguments.at_once,
        progress=progress,
    )
    report |= {"judge": client.model, "questions": len(questions), "unclear": unclear(items, journal)}
    report["spent"] = _figures(spent, arguments)
    return verdicts_of(items, journal), single_ratings(items, journal)


def _answers(arguments: argparse.Namespace, questions: Sequence[JudgeQuestion]) -> list[ModelAnswers]:
    model_answers = []
    for given in arguments.answers:
        name, _, path = given.rpartition("=")
        if Path(path).suffix == ".jsonl":
            model_answers.append(read_answers(Path(path), questions, name or None))
            continue
        if arguments.dry_run:
            raise UserError(f"--answers {path}: a model would have to answer first; --dry-run needs .jsonl files")
        # Torch loads here, so that judging files never waits for it.
        from meshwright.serve.examine import answer_questions
        from meshwright.serve.served import default_name
        from meshwright.serve.trained import open_trained

        trained = open_trained(Path(path), device=arguments.device)
        name = name or default_name(trained)
        turns = answer_questions(trained, [question.turns for question in questions], max_tokens=arguments.max_tokens)
        rows = [answer_record(question, name, answers) for question, answers in zip(questions, turns, strict=True)]
        place = arguments.out / f"answers-{name}.jsonl"
        write_durably(place, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"answered  {place}: {len(rows)} questions by {trained.source}")
        model_answers.append(read_answers(place, questions, name))
    return model_answers


def _figures(cost: TokensUsed, arguments: argparse.Namespace) -> dict[str, Any]:
    return {**asdict(cost), "price": cost.price(arguments.price)}


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for name in ("estimate", "spent"):
        if name in report:
            cost = report[name]
            price = "" if cost["price"] is None else f", price {cost['price']:.4g}"
            what = "would cost" if name == "estimate" else "cost"
            yield (
                f"{what:10}{cost['requests']} requests, {cost['prompt_tokens']} tokens read and "
                f"{cost['completion_tokens']} written{price}"
            )
    if report.get("unclear"):
        yield f"unclear   {report['unclear']} replies held no verdict; run again to ask again"
    for pair in report.get("pairs", []):
        yield (
            f"{pair['model_a']} against {pair['model_b']}: {pair['wins']} wins, {pair['ties']} ties, "
            f"{pair['losses']} losses; win rate {_interval(pair['rate'], 3)}"
        )
    for title, key, digits in (("rating", "ratings", 0), ("mean rating", "mean_ratings", 2)):
        for name, rated in report.get(key, {}).items():
            yield f"{title:12}{name}: {_interval(rated, digits)}"
        for heading in ("turn", "category"):
            for group, compared in report.get(f"by_{heading}", {}).items():
                if key in compared:
                    shown = ", ".join(f"{name} {one['value']:.{digits}f}" for name, one in compared[key].items())
                    yield f"{title:12}{heading} {group or 'none'}: {shown}"


def _interval(figures: dict[str, float], digits: int) -> str:
    """`0.667 [0.500, 0.833]`: a value and its interval."""
    value, low, high = (f"{figures[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
