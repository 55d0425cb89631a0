from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LinkError
from tonnage.plan import read_cluster
from tonnage.plan.cluster import cluster_from_table
from tonnage.plan.probe import Measured, Sample, fit_line, measured_cluster, measured_table, to_toml

OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def timings(latency: float, bandwidth: float, *, size: int = 8, noise: float = 0.0) -> tuple[Sample, ...]:
    samples = []
    for i, nbytes in enumerate(2**e for e in range(10, 27, 2)):
        for op in OPS:
            one = Sample(op=op, group_size=size, nbytes=nbytes, seconds=1.0)
            seconds = (latency + one.wire / bandwidth) * (1 + noise * (-1) ** i)
            samples.append(Sample(op=op, group_size=size, nbytes=nbytes, seconds=seconds))
    return tuple(samples)


@given(latency=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e8, 1e12), size=st.integers(2, 64))
def test_a_line_is_found_again_from_its_own_points(latency: float, bandwidth: float, size: int) -> None:
    line = fit_line(timings(latency, bandwidth, size=size))
    assert line.latency == pytest.approx(latency, rel=1e-3)
    assert line.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert line.worst < 1e-6


@given(noise=st.floats(0.0, 0.2))
def test_the_error_told_is_the_noise_of_the_points(noise: float) -> None:
    line = fit_line(timings(2e-5, 2e10, noise=noise))
    assert line.error <= noise * 1.5 + 1e-6
    assert line.bandwidth == pytest.approx(2e10, rel=3 * noise + 1e-6)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [Sample(op="all-reduce", group_size=2, nbytes=1024, seconds=1e-5)],
        [Sample(op="all-reduce", group_size=2, nbytes=n, seconds=0.0) for n in (1024, 2048)],
        [Sample(op="all-reduce", group_size=2, nbytes=n, seconds=1 / n) for n in (1024, 2**26)],
    ],
)
def test_points_without_a_line_are_refused(samples: list[Sample]) -> None:
    with pytest.raises(LinkError) as caught:
        fit_line(samples)
    assert caught.value.hint


def measured(**changes: object) -> Measured:
    fields: dict[str, object] = {
        "device": 'card "X"',
        "matmul": 2e14,
        "copy": 1.5e12,
        "memory": 8e10,
        "processors": 108,
        "world_size": 16,
        "local_size": 8,
        "inside": timings(1e-5, 2e11),
        "outside": timings(3e-5, 2e10, size=2),
    }
    return Measured(**{**fields, **changes})  # type: ignore[arg-type]


def test_what_was_measured_comes_back_from_the_file(tmp_path: Path) -> None:
    table = measured_table(measured())
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(table))
    cluster = read_cluster(path)
    assert dataclasses.replace(cluster.device, source="") == dataclasses.replace(
        measured_cluster(measured()).device, source=""
    )
    assert cluster.scaleup == measured_cluster(measured()).scaleup
    assert cluster.num_devices == 16
    assert cluster.domain == 8
    assert cluster.scaleup.bandwidth == pytest.approx(2e11, rel=1e-3)
    assert cluster.nic.latency == pytest.approx(3e-5, rel=1e-3)
    assert cluster.device.rate("bf16") == 2e14


def test_a_level_that_was_not_measured_keeps_the_usual_figures() -> None:
    table = measured_table(measured(outside=(), world_size=8))
    assert "nic" not in table
    assert cluster_from_table(table, where="test").nic.rate > 0


@pytest.mark.ranks
def test_two_real_ranks_measure_the_loopback_and_write_the_file(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "cluster.toml"
    code = (
        "import argparse; from tonnage.cli import probe; p = argparse.ArgumentParser(); "
        "probe.add_parser(p.add_subparsers()); a = p.parse_args(); raise SystemExit(a.run(a))"
    )
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        code,
        "probe",
        "--out",
        str(out),
        "--largest",
        "1MiB",
        "--json",
    ]
    ranks = [
        subprocess.Popen(
            [*command, "--repeat", "2"],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [each.communicate(timeout=120) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], outputs
    document = json.loads(outputs[0][0])
    assert document["schema"] == "tonnage.probe/1"
    assert {sample["op"] for sample in document["samples"]} == {"all-reduce", "all-gather"}
    assert tomllib.loads(out.read_text())["num_devices"] == 2
    cluster = read_cluster(out)
    assert cluster.scaleup.rate > 1e6
    assert cluster.device.matmul > 1e8
