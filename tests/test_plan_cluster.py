"""Clusters by name, file and machine; devices by users' spellings; collectives as measured."""

import csv
import re
from dataclasses import replace
from importlib import resources
from math import exp, log
from pathlib import Path
from statistics import mean

import pytest

from meshwright.cli.main import main
from meshwright.machine import Machine
from meshwright.predict.comm import CommGroup, Wires, axis_group, visited
from meshwright.predict.constants import FITTED
from meshwright.predict.hardware import (
    device_cluster,
    find_device,
    hardware_table,
    local_cluster,
    multiplies_fp8,
    resolve_cluster,
)
from meshwright.spec.cluster import HOST_GB, ClusterSpec
from meshwright.spec.recipe import dump_recipe

GIB = 2**30 / 1e9


@pytest.mark.parametrize(
    ("name", "devices", "row", "memory", "network"),
    [
        ("8xh100", 8, "H100-SXM-80GB", 80, 50.0),
        ("64xa100-80g@400Gb/s", 64, "A100-SXM-80GB", 80, 6.25),
        ("64xa100-40g@50GB/s", 64, "A100-SXM-40GB", 40, 6.25),
        ("16xh200@400Gb/s/gpu", 16, "H200-SXM-141GB", 141, 50.0),
        ("1024xgb200", 1024, "GB200", 186, 50.0),
        ("4xrtx 4090", 4, "RTX 4090", 24, 3.1 / 4),
        ("1xrtx5060ti-8g", 1, "RTX 5060 Ti", 8, 3.1),
        ("8xA100-SXM-80GB", 8, "A100-SXM-80GB", 80, 25.0),
        ("8xa100-sxm4-40gb@400Gb/s", 8, "A100-SXM-40GB", 40, 6.25),
        ("1x5090", 1, "RTX 5090", 32, 3.1),
        ("4 x 3090", 4, "RTX 3090", 24, 3.1 / 4),
        ("2xNVIDIA GeForce RTX 4090", 2, "RTX 4090", 24, 3.1 / 2),
        ("8xtpu-v5p", 8, "TPU v5p", 95, 50.0),
        ("8x910b", 8, "910B", 64, 50.0),
    ],
)
def test_a_short_name_is_a_cluster(name: str, devices: int, row: str, memory: float, network: float) -> None:
    cluster = resolve_cluster(name, base_dir=Path())
    assert (cluster.devices, cluster.device) == (devices, row)
    assert cluster.memory_gb == pytest.approx(memory * GIB * 0.985)
    assert cluster.network_gb_s == pytest.approx(network)


def test_racks_are_wider_than_nodes() -> None:
    cluster = resolve_cluster("144xgb200", base_dir=Path())
    assert (cluster.per_node, cluster.domain) == (4, 72)


@pytest.mark.parametrize("written", ["A100-80GB-SXM", "NVIDIA A100-SXM4-80GB", "a100", "A100-SXM-80GB"])
def test_devices_are_found_as_people_write_them(written: str) -> None:
    assert find_device(written)["name"] == "A100-SXM-80GB"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8xh1000", "unknown device 'h1000'; did you mean h100. known are 910B, A10, A100"),
        ("8xh100@400", "the rate needs a unit, Gb/s .bits. or GB/s .bytes., as in 8xh100@400Gb/s"),
        ("8xh100@400/gpu", "as in 8xh100@400Gb/s/gpu"),
        ("8", "8xh100 or 64xa100-80g@400Gb/s"),
        ("8 gpus!", "8xh100 or 64xa100-80g@400Gb/s"),
        ("0xh100", "8xh100 or 64xa100-80g@400Gb/s"),
        ("rtx4060ti-12g", "no rtx4060ti with 12 GB is known, only with 8 or 16 GB"),
    ],
)
def test_unknown_clusters_are_refused_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_cluster(name, base_dir=Path())


def test_a_cluster_file_is_read_and_a_missing_one_named(tmp_path: Path) -> None:
    cluster = device_cluster("h100", 16).model_copy(update={"price_per_hour": 1.25})
    (tmp_path / "mine.yaml").write_text(dump_recipe(cluster))
    assert resolve_cluster("mine.yaml", base_dir=tmp_path) == cluster
    assert resolve_cluster(cluster, base_dir=tmp_path) is cluster
    with pytest.raises(ValueError, match=r"does not exist; 'meshwright plan calibrate yours.yaml' writes one"):
        resolve_cluster("yours.yaml", base_dir=tmp_path)


OWN = (
    "{{name: ours, device: card, devices: 8, per_node: 8, domain: 8, memory_gb: 80, memory_gb_s: 900, link_gb_s: 25, "
    "network_gb_s: 3, {rates}}}"
)


@pytest.mark.parametrize(
    ("rates", "precision", "message"),
    [
        ("tflops: {bf16: 70}", "fp16", ""),
        ("tflops: {bf16: 70}", "fp32", r"cluster ours: tflops has no fp32, in which .*tflops: \{bf16: \.\.\., fp32: "),
        ("tflops: {bf16: 70}", "mxfp8", r"cluster ours: tflops has no fp32"),
        ("tflops: {bf16: 70, fp32: 9}", "mxfp8", ""),
        ("tflops: {fp16: 70}", "bf16", r"ours.yaml:1: tflops has no bf16"),
        ("tflops: {bf16: 70}, achievable_tflops: {bf16: 0.7}", "bf16", r"ours.yaml:1: achievable.*not a fraction"),
        ("tflops: {bf16: 70}, achievable_tflops: {bf16: 60}", "bf16", ""),
    ],
)
@pytest.mark.every(1)
def test_rates_that_a_cluster_file_lacks_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    rates: str,
    precision: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.yaml").write_text(OWN.format(rates=rates))
    recipe = "{model: gpt2, data: {sequence_length: 1024}, training: {global_batch: 16, micro_batch: 1}}"
    (tmp_path / "run.yaml").write_text(recipe)
    words = ["plan", "run.yaml", "--cluster", "ours.yaml", f"training.precision={precision}", "layout={dp_shard: 8}"]
    assert main([*words, "--top", "1"]) == (2 if message else 0)
    assert re.search(message, capsys.readouterr().err)


def test_local_is_this_machine() -> None:
    h200 = Machine(kind="gpu", name="NVIDIA H200", devices=2, memory_bytes=150 * 10**9)
    cluster = resolve_cluster("local", base_dir=Path(), machine=h200)
    assert (cluster.name, cluster.device, cluster.devices) == ("local", "H200-SXM-141GB", 2)
    assert (cluster.memory_gb, cluster.host_memory_gb) == (150, HOST_GB)
    told = resolve_cluster("local", base_dir=Path(), machine=replace(h200, host_memory_bytes=64 * 10**9))
    assert told.host_memory_gb == 64
    cpu = local_cluster(Machine(kind="cpu", name="cpu", devices=4, memory_bytes=8 * 10**9), ranks=2)
    assert (cpu.devices, cpu.memory_gb) == (2, 4.0)


def test_gpus_without_fp8_are_known() -> None:
    machines = {name: Machine("gpu", name, 1, 10**10) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA L4", "A card")}
    assert [multiplies_fp8(machine) for machine in machines.values()] == [False, True, True]
    assert not multiplies_fp8(Machine("cpu", "cpu", 1, 10**10))


def test_every_row_of_the_hardware_table_makes_a_cluster() -> None:
    rows = [row["name"] for row in hardware_table() if not row["name"].startswith(("TPU", "Gaudi"))]
    assert len(rows) > 25
    for name in rows:
        cluster = device_cluster(name.split(" (")[0], 8)
        assert isinstance(cluster, ClusterSpec)
        assert cluster.tflops["fp16"] > 20
        assert cluster.tflops["bf16"] in (cluster.tflops["fp16"], cluster.tflops["fp32"])
        assert all(rate < 0.98 * cluster.tflops[precision] for precision, rate in cluster.achievable_tflops.items())
        assert cluster.tflops["bf16"] / cluster.tflops["fp32"] < 32
    assert [device_cluster(name, 1).tflops["fp32"] for name in ("a100", "h100", "rtx 4090")] == [19.5, 67, 82.6]
    fp8 = {name: "fp8" in device_cluster(name, 1).tflops for name in ("a100", "rtx 3090", "rtx 4090", "l4", "h800")}
    assert fp8 == {"a100": False, "rtx 3090": False, "rtx 4090": True, "l4": True, "h800": True}
    h20, h200 = device_cluster("h20", 8), device_cluster("h200", 8)  # the same chip with fewer units
    shares = [cluster.achievable_tflops["bf16"] / cluster.tflops["bf16"] for cluster in (h20, h200)]
    assert shares[0] == pytest.approx(shares[1])


def test_an_axis_leaves_the_node_where_its_ranks_do() -> None:
    cluster = device_cluster("h100", 32)
    assert axis_group(cluster, 8, 1) == CommGroup(8, 8)
    assert axis_group(cluster, 16, 1) == CommGroup(16, 8)
    assert axis_group(cluster, 4, 8) == CommGroup(4, 1)
    assert axis_group(cluster, 8, 2) == CommGroup(8, 4)
    assert axis_group(cluster, 8, 2).domains == 2


def test_a_ring_of_several_nodes_is_as_fast_as_the_slower_of_link_and_network() -> None:
    wires = Wires.of(device_cluster("h100", 64), FITTED)
    inside, across, lonely = CommGroup(8, 8), CommGroup(64, 8), CommGroup(8, 1)
    payload = 8e9
    assert wires.all_reduce(inside, payload) < wires.all_reduce(across, payload) < wires.all_reduce(lonely, payload)
    assert wires.all_reduce(inside, payload) == pytest.approx(2 * wires.all_gather(inside, payload), rel=0.01)
    assert wires.all_gather(CommGroup(1, 1), payload) == 0


def test_a_relay_sends_a_token_once_to_each_place() -> None:
    wires = Wires.of(device_cluster("h100", 64), FITTED)
    inside, across = CommGroup(8, 8), CommGroup(64, 8)
    assert visited(1, 5) == 1
    assert visited(8, 1) == pytest.approx(1 / 8)
    # By counting: of the 4**3 ways to draw 3 of 4 places, 37 have a given one.
    assert visited(4, 3) == pytest.approx(37 / 64)
    for group in (inside, across):
        assert wires.all_to_all(group, 8, 1e8, relay=True) < wires.all_to_all(group, 8, 1e8, relay=False)
    one = wires.all_to_all(across, 1, 1e9, relay=False) * wires.scattered
    assert one == pytest.approx(1e9 * 56 / 64 / wires.network, rel=0.01)


def test_collectives_agree_with_measurements() -> None:
    """nccl-tests of two nodes, 1 MiB to 16 GiB: right on the mean, within a factor of 1.4 at the mean size."""
    text = resources.files("meshwright.predict").joinpath("data/collectives.csv").read_text(encoding="utf-8")
    devices = {"8xA100 node (NVLink 3)": "a100", "8xH200 node (NVLink 4)": "h200"}
    ratios = []
    for row in csv.DictReader(text.splitlines()):
        if row["system"] not in devices or not row["time_ms"] or float(row["bytes"]) < 2**20:
            continue
        ranks, payload = int(row["gpus"]), float(row["bytes"])
        wires = Wires.of(device_cluster(devices[row["system"]], 8), FITTED)
        operation = wires.all_reduce if row["collective"] == "all_reduce" else wires.all_gather
        ratios.append(log(operation(CommGroup(ranks, ranks), payload) / (float(row["time_ms"]) / 1e3)))
    assert len(ratios) >= 30
    assert 1 / 1.3 < exp(mean(ratios)) < 1.3
    assert exp(mean(map(abs, ratios))) < 1.4
