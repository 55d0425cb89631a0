"""``tonnage plan`` as it is typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tonnage.cli import main
from tonnage.plan import presets

EXAMPLE = [
    "llama3-70b",
    "--cluster",
    "h100x512",
    "--tp",
    "8",
    "--pp",
    "4",
    "--micro-batch",
    "1",
    "--global-batch",
    "512",
    "--seq",
    "8192",
]
RUNS = Path(__file__).parents[1] / "data" / "published_runs.csv"


def test_the_example_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *EXAMPLE]) == 0
    out = capsys.readouterr().out
    assert "llama3-70b on 512 H100-SXM" in out
    assert "451 GB" in out
    assert "stage   3 |" in out


def test_json_is_one_document_with_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *EXAMPLE, "--json", "--what-if", "nic=100", "--what-if", "compress=int8"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "tonnage.plan/1"
    assert document["layout"]["dp"] == 16
    assert sum(document["parts"].values()) == pytest.approx(document["step_seconds"])
    assert [each["change"] for each in document["what_if"]] == ["nic=100", "compress=int8"]
    assert document["what_if"][0]["step_seconds"] > document["step_seconds"]


def test_html_and_ledger_are_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, ledger = tmp_path / "plan.html", tmp_path / "plan.ledger"
    assert main(["plan", *EXAMPLE, "--html", str(page), "--ledger", str(ledger), "--what-if", "nic=100"]) == 0
    assert "<html" in page.read_text("utf-8")
    assert ledger.read_bytes()[:4] == b"PAR1"
    assert "page:" in capsys.readouterr().err


def test_a_config_and_a_cluster_file_are_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, cluster = tmp_path / "config.json", tmp_path / "cluster.toml"
    config.write_text(json.dumps(presets()["llama3-8b"]))
    cluster.write_text('card = "h100"\nnum_devices = 16\n')
    assert main(["plan", str(config), "--cluster", str(cluster), "--search", "--seq", "8192"]) == 0
    out = capsys.readouterr().out
    assert "best layouts" in out
    assert "why the first wins" in out


def test_a_search_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", "--cluster", "h100x16", "--search", "--top", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["best"]) == 3
    assert document["considered"] > document["too_large"]


def test_chinese_is_spoken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *EXAMPLE, "--lang", "zh", "--explain", "--what-if", "nic=100"]) == 0
    out = capsys.readouterr().out
    assert "每步" in out
    assert "流水线气泡" in out
    assert "序列并行" in out


def test_explain_shows_terms_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *EXAMPLE, "--explain", "--tokens", "1e12"]) == 0
    out = capsys.readouterr().out
    assert "dense bf16 peak" in out
    assert "= 32" in out
    assert "slowest NIC that costs at most 5 %" in out
    assert "card hours" in out


def test_a_measured_step_names_an_implausible_link(capsys: pytest.CaptureFixture[str]) -> None:
    # LlamaFactory issue 3499: 8B, adapters, 3 x A100 with peer-to-peer off: 60 s a step where 42.8 GB move.
    command = ["plan", "llama3-8b", "--cluster", "1x3xA100", "--zero", "3", "--lora", "8", "--seq", "2048"]
    assert main([*command, "--global-batch", "6", "--software", "fsdp", "--measured", "60"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "42.9 GB of dp" in out
    assert "724 MB/s, 0.2% of the line" in out
    assert "NCCL_P2P_DISABLE" in out
    assert main([*command, "--global-batch", "6", "--measured", "0.01"]) == 0
    assert "not what bounds it" in capsys.readouterr().out


def test_a_budget_names_the_cheapest_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama3-8b", "--tokens", "1e12", "--days", "90", "--cards", "h100", "--most", "128"]
    assert main([*command, "--price", "h100=2.5", "--json"]) == 0
    offers = json.loads(capsys.readouterr().out)["offers"]
    assert offers[0]["cost"] == pytest.approx(2.5 * offers[0]["device_hours"])
    assert all(offer["days"] <= 90 for offer in offers)


def test_lora_on_sharded_weights_over_a_slow_network_is_bound_by_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # LlamaFactory issue 5014: 8B, adapters, 2 hosts, 10 Gbit/s a host: two gathers of 15.06 GB a micro-batch.
    command = ["plan", "llama3-8b", "--cluster", "2x8xA100", "--nic", "1.25", "--lora", "8", "--seq", "2048"]
    common = ["--global-batch", "16", "--software", "fsdp", "--json"]
    assert main([*command, *common, "--zero", "3"]) == 0
    sharded = json.loads(capsys.readouterr().out)
    assert sharded["step_seconds"] > 24
    assert main([*command, *common, "--zero", "0"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["parts"]["dp"] < 1


def test_accuracy_of_a_file_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = RUNS.read_text("utf-8").splitlines()
    some, page = tmp_path / "runs.csv", tmp_path / "accuracy.md"
    some.write_text("\n".join([lines[0], *lines[1:40:4]]) + "\n")
    assert main(["plan", "accuracy", str(some), "--json", "--markdown", str(page)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["refused"] == []
    assert "korthikanti2022-table5" in page.read_text("utf-8")


def test_a_utilisation_is_converted(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "convert-mfu", "45%", "--model", "llama3-8b", "--seq", "8192", "--from", "megatron"]
    assert main([*command, "--to", "megatron-bridge", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["to"][0]["mfu"] == pytest.approx(0.45 * 51.5 / 57.9, abs=0.002)
    assert main(command) == 0
    assert "palm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", ["--tp", "--micro-batch", "--global-batch", "--seq", "--tokens", "--virtual"]
)
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_number_that_can_not_be_meant_is_wrong_use(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "llama3-8b", "--cluster", "h100x8", f"{option}={value}"])
    assert caught.value.code == 2
    assert value in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["lama3-70b", "--cluster", "h100x8"], 1, "did you mean"),
        (["llama3-70b"], 2, "on which cluster"),
        (["llama3-70b", "--cluster", "h100x512", "--tp", "7"], 1, "does not divide 512 cards"),
        (["llama3-70b", "--cluster", "h100x512", "--tp", "8", "--dp", "3"], 1, "512 cards"),
        (["llama3-70b", "--cluster", "h100"], 1, "no cluster"),
        (["llama3-70b", "--cluster", "h100x8", "--global-batch", "7"], 1, "no multiple"),
        (["llama3-70b", "--cluster", "h100x8", "--search"], 1, "fits in no layout"),
        (["llama3-70b", "--cluster", "h100x8", "--what-if", "nik=3"], 2, "did you mean nic"),
        (["accuracy", "none.csv"], 2, "can't read the runs"),
        (["convert-mfu", "45%"], 2, "needs a share, a model"),
        (["convert-mfu", "lots", "--model", "llama3-8b", "--from", "megatron"], 2, "no share"),
        (["llama3-8b", "extra", "--cluster", "h100x8"], 2, "'extra'"),
        (["llama3-8b", "--days", "3"], 2, "how many tokens"),
        (["./config.json", "--cluster", "h100x8"], 1, "can't read the model"),
        (["llama3-8b", "--cluster", "h100x8", "--attention", "flash9"], 1, "did you mean flash"),
        (["llama3-8b", "--cluster", "h100x8", "--context", "donut"], 1, "no context 'donut'"),
        (["llama3-8b", "--cluster", "h100x8", "--grad-bytes", "3"], 1, "gradients of 3 bytes"),
        (["llama3-8b", "--cluster", "h100x8", "--what-if", "zero=nan"], 2, "zero is 'nan'"),
        (["llama3-8b", "--cluster", "h100x8", "--what-if", "oversubscription=0"], 1, "oversubscription of 0"),
        (["llama3-8b", "--cluster", "h100x99999999999999999999"], 1, "use at most"),
        (["llama3-8b", "--days", "3", "--tokens", "1e12", "--price", "h100=nan"], 2, "is no price"),
        (["llama3-8b", "--days", "3", "--tokens", "1e12", "--price", "h900=3"], 2, "not asked about"),
        (["llama3-8b", "--cluster", "h100x8", "--html", "/none/x.html"], 2, "can't write the page"),
        (["convert-mfu", "500%", "--model", "llama3-8b", "--from", "megatron"], 2, "utilisation of 500%"),
    ],
)
def test_a_mistake_is_one_clear_sentence(
    command: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *command]) == status
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert main(["plan", *command, "--json"]) == status
    assert json.loads(capsys.readouterr().out)["error"]["what"]


def test_a_layout_that_does_not_fit_names_the_nearest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", "--cluster", "h100x8", "--zero", "0"]) == 0
    assert "nearest that does: --zero 3" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "llama3-8b", "--cluster", "h100x8", "--zero", "0", "--lang", "zh"]) == 0
    assert "--zero 3" in capsys.readouterr().out


def test_the_slowest_nic_is_where_the_time_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *EXAMPLE, "--slowest-nic", "5%", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rate = document["slowest_nic_rate"] * 8 / 1e9
    assert main(["plan", *EXAMPLE, "--json", "--what-if", f"nic={rate:.3f}"]) == 0
    changed = json.loads(capsys.readouterr().out)
    loss = changed["what_if"][0]["step_seconds"] / changed["step_seconds"] - 1
    assert loss == pytest.approx(0.05, abs=0.02)
    assert main(["plan", "llama3-8b", "--cluster", "h100x8", "--slowest-nic", "5%"]) == 0
    assert "any, nothing is sent between hosts" in capsys.readouterr().out


def test_the_ledger_of_several_links_claims_no_single_rate(tmp_path: Path) -> None:
    from tonnage.ledger import read_ledger

    path = tmp_path / "plan.ledger"
    assert main(["plan", *EXAMPLE, "--ledger", str(path)]) == 0
    assert "link_rate" not in read_ledger(path).facts
    assert main(["plan", "llama3-8b", "--cluster", "h100x8", "--ledger", str(path)]) == 0
    assert read_ledger(path).facts["link_rate"] == 450e9


@pytest.mark.parametrize("search", [[], ["--search"]])
def test_a_closed_pipe_and_an_interrupt_end_quietly(search: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tonnage", "plan", "llama3-8b", "--cluster", "h100x64", *search]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        ended = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert ended.returncode == 141
    assert ended.stderr == ""


def test_an_interrupted_search_ends_with_130() -> None:
    command = [
        sys.executable,
        "-m",
        "tonnage",
        "plan",
        "llama3.1-405b",
        "--cluster",
        "h100x16384",
        "--search",
    ]
    with subprocess.Popen(
        [*command, "--global-batch", "2048"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        deadline = time.monotonic() + 30
        # Numbers are loaded once its memory has grown; the search itself takes seconds from there.
        status = Path(f"/proc/{running.pid}/status")
        while time.monotonic() < deadline and "numpy" not in Path(f"/proc/{running.pid}/maps").read_text():
            assert status.exists()
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert (out, err) == ("", "")
