"""The verb `rehearse`: runs the whole job on fake ranks; reports memory, traffic and what would break."""

import argparse
import re
from typing import Any

from meshwright.cli.common import (
    add_page_argument,
    add_recipe_arguments,
    check_page_name,
    positive,
    read_recipe,
    write_page,
)
from meshwright.cli.output import add_json_argument, print_result, size_text
from meshwright.cli.waiting import waiting
from meshwright.machine import Machine
from meshwright.pages.rehearsal import rehearsal_page
from meshwright.predict.hardware import resolve_cluster
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.display import short
from meshwright.trainer.remedies import remedies, remedy_lines
from meshwright.trainer.resolve import resolve_run

ORDER = ("weights", "gathered weights", "gradients", "optimizer", "activations")
"""Kinds of memory in printing order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `rehearse`."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--world", type=positive, metavar="N", help="grow the data-parallel axis until the job has N ranks"
    )
    parser.add_argument("--cluster", metavar="NAME", help="cluster to check against, such as 1024xh100")
    parser.add_argument(
        "--ranks", type=_ranks, metavar="R,R", help="ranks to rehearse (default: the first of each pipeline stage)"
    )
    parser.add_argument(
        "--memory", type=_gigabytes, metavar="GB", help="device memory in GB (10**9 bytes), instead of the cluster's"
    )
    parser.add_argument(
        "--deadlocks",
        action="store_true",
        help="instead of memory, prove for all ranks that NCCL's rules hold and no rank waits for ever",
    )
    add_page_argument(parser, "memory over a step and collectives, rank by rank,")
    add_json_argument(parser)
    parser.epilog = (
        "exit status: 0 nothing would break, 1 something would, 2 invalid command line\n\n"
        "examples:\n"
        "  meshwright rehearse run.yaml --cluster 8xh100\n"
        "  meshwright rehearse run.yaml --world 1024 --cluster 1024xh100 --ranks 0,1023\n"
        "  meshwright rehearse run.yaml --world 1024 --deadlocks"
    )


def run(arguments: argparse.Namespace) -> int:
    """Rehearse; the exit status is 1 if something would break."""
    from meshwright.rehearse.world import fill_world

    if arguments.deadlocks and arguments.memory:
        raise UserError("--memory: is not compared with --deadlocks, which measures none; leave one of the two out")
    if arguments.html and arguments.deadlocks:
        raise UserError("--html: shows memory and collectives, which --deadlocks does not measure; leave one out")
    if arguments.html:
        check_page_name(arguments.html)
    recipe = read_recipe(arguments)
    if arguments.world is not None:
        recipe = fill_world(recipe, arguments.world)
    base_dir = arguments.recipe.parent
    if arguments.cluster:
        recipe = recipe.model_copy(update={"cluster": arguments.cluster})
    cluster = resolve_cluster(recipe.cluster, base_dir=base_dir)
    if arguments.memory:
        cluster = cluster.model_copy(update={"memory_gb": arguments.memory})
    resolved = resolve_run(recipe, base_dir=base_dir, machine=_machine(cluster))
    return (_prove if arguments.deadlocks else _measure)(arguments, resolved, cluster)


def _measure(arguments: argparse.Namespace, resolved: ResolvedRun, cluster: ClusterSpec) -> int:
    from meshwright.rehearse.world import device_peak, findings, rehearse, typical_ranks

    recipe = resolved.run
    ranks = arguments.ranks or typical_ranks(recipe.layout)
    on_gpu, kind = cluster.device != "cpu", "timeline" if arguments.html else "memory"
    with waiting("rehearsing"):
        reports = rehearse(resolved, ranks, on_gpu=on_gpu, fp8="fp8" in cluster.tflops, kind=kind)
    memory_bytes = int(cluster.memory_gb * 1e9)
    problems = findings(reports, recipe.layout, memory_bytes=memory_bytes, per_node=cluster.per_node)
    fits = all(device_peak(report) <= memory_bytes for report in reports)
    would_fit = [] if fits else remedies(resolved, _machine(cluster), memory_bytes)
    overrides = [list(remedy.overrides) for remedy in would_fit]
    facts = {"layout": recipe.layout.model_dump(), "ranks": reports, "findings": problems, "remedies": overrides}
    lines = [*_lines(resolved, reports), *(f"would break: {finding}" for finding in problems)]
    lines += [] if problems else ["no problems found"]
    if not fits:
        lines += ["predicted to fit, fastest first:", *(f"  {line}" for line in remedy_lines(would_fit))]
    print_result(arguments, facts, lines)
    if arguments.html:
        write_page(
            arguments.html,
            rehearsal_page(reports, about=lines[0], findings=problems, memory=memory_bytes),
        )
    return 1 if problems else 0


def _prove(arguments: argparse.Namespace, resolved: ResolvedRun, cluster: ClusterSpec) -> int:
    from meshwright.rehearse.deadlocks import prove

    on_gpu = cluster.device != "cpu"
    with waiting("recording ranks and checking them"):
        facts = prove(resolved, arguments.ranks or (), on_gpu=on_gpu, fp8="fp8" in cluster.tflops)
    layout, counts = resolved.run.layout, facts["microbatches"]
    shortened = f"{' and '.join(map(str, counts))} of " if counts[0] < resolved.accumulation else ""
    lines = [
        f"{layout.strategy}: {layout.world_size} ranks, of which {len(facts['recorded'])} recorded in "
        f"{facts['seconds']['recording']:.0f} s; checked in {facts['seconds']['checking']:.0f} s",
        f"  classes    {', '.join(f'{len(ranks)} like rank {ranks[0]}' for ranks in facts['classes'])}",
        f"  recorded   ranks {', '.join(map(str, facts['recorded']))}: two steps of {shortened}"
        f"{resolved.accumulation} microbatch{'es' if resolved.accumulation > 1 else ''}, and an evaluation",
        f"  checked    {facts['operations']:,} operations of all ranks",
        *(f"would break: {finding}" for finding in facts["findings"]),
        *(f"would break in a process group bound to its device: {finding}" for finding in facts["bound"]),
    ]
    lines += [] if facts["findings"] else ["proven: NCCL's rules hold on every rank, and no rank waits for ever"]
    print_result(arguments, facts, [*lines, "assumed:", *(f"  {assumption}" for assumption in facts["assumed"])])
    return 1 if facts["findings"] else 0


def _gigabytes(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not allowed: must be a number of GB, above 0")
    return float(text)


def _ranks(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _machine(cluster: ClusterSpec) -> Machine:
    """One node of the cluster, for resolving `auto`."""
    memory_bytes = int(cluster.memory_gb * 1e9)
    if cluster.device == "cpu":
        return Machine("cpu", "cpu", cluster.per_node, memory_bytes * cluster.per_node)
    return Machine("gpu", cluster.device, cluster.per_node, memory_bytes)


def _lines(resolved: ResolvedRun, reports: list[dict[str, Any]]) -> list[str]:
    layout = resolved.run.layout
    lines = [
        f"{layout.strategy}: {layout.world_size} ranks, of which {len(reports)} rehearsed; "
        f"{resolved.accumulation} microbatch{'es' if resolved.accumulation > 1 else ''} "
        f"of {resolved.micro_batch} x {resolved.run.data.sequence_length} tokens"
    ]
    for report in reports:
        place = ", ".join(f"{axis} {index}" for axis, index in report["place"].items()) or "alone"
        lines += [
            "",
            f"rank {report['rank']} ({place}), rehearsed in {report['seconds']:.0f} s",
            f"  holds      {short(report['parameters'])} parameters; "
            f"between steps {size_text(sum(report['at_rest'].values()))}: {_parts(report['at_rest'])}",
            f"  peak       {size_text(report['peak'])} in the {report['peak_phase']}: {_parts(report['peak_by_kind'])}",
            *([f"  host       {size_text(report['host'])} of it in the host's memory"] if report["host"] else []),
            f"  computes   {report['flops'] / 1e12:.2f} TFLOP a step",
            f"  checkpoint {report['checkpoint']['pieces']} pieces, {size_text(report['checkpoint']['bytes'])}, "
            "including replicas on other ranks",
        ]
        lines += [
            f"  {'sends' if index == 0 else '':10} {entry['kind']:14} over {entry['axis']:16} "
            f"{entry['calls']:6} x, {size_text(entry['bytes'])}"
            for index, entry in enumerate(report["traffic"])
        ]
    return lines


def _parts(by_kind: dict[str, int]) -> str:
    return ", ".join(f"{kind} {size_text(by_kind[kind])}" for kind in ORDER if by_kind.get(kind))
