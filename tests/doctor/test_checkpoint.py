"""doctor checkpoint: published sizes from config.json alone, real folders to the byte, broken ones in one sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.doctor.__main__ import main
from services.doctor.checkpoint import inspect
from services.model.checkpoint import read_entries
from tests.families import write_family
from tests.model.published import PUBLISHED, V3

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "deploy" / "demo_model"


def write_config(folder: Path, raw: dict[str, object]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize(
    ("case", "billions", "active", "token_bytes"),
    [
        ("v3", 671.03, 37.55, 70272),
        ("v3_1", 671.03, 37.55, 70272),
        ("v2", 235.74, 21.38, 69120),
        ("v2_lite", 15.71, 2.66, 31104),
        ("moonlight", 15.96, 2.91, 31104),
        ("kimi_k2", 1026.41, 32.86, 70272),
    ],
)
def test_published_sizes(case: str, billions: float, active: float, token_bytes: int, tmp_path: Path) -> None:
    report = inspect(write_config(tmp_path, PUBLISHED[case]))
    assert report.num_params / 1e9 == pytest.approx(billions, abs=0.005)
    assert report.num_active / 1e9 == pytest.approx(active, abs=0.005)
    assert report.layout.token_bytes == token_bytes and report.revision is None


def test_a_rank_of_v3_at_ep128(tmp_path: Path) -> None:
    """Parts as the roofline has them (FP8 with its scales, gate and embeddings bf16): 24.6 GB."""
    write_config(tmp_path, V3)
    report = inspect(tmp_path, ep=128)
    parts = report.rank_bytes
    assert parts["attention"] == pytest.approx(11416215392, rel=1e-3)
    assert (parts["shared experts"], parts["routed experts"], parts["dense MLPs"]) == (2554954752, 5109909504, 1189375488)
    assert parts["embedding and head"] == 3706716160 and parts["MTP layer"] == pytest.approx(425759456, rel=1e-3)
    assert report.total_bytes / 1e9 == pytest.approx(24.6, abs=0.05)
    assert report.num_pages(141) == (int(141e9 * 0.9) - report.total_bytes) // 4497408 and report.num_pages(24) == 0
    whole, half = inspect(tmp_path), inspect(tmp_path, tp=2)
    heads = 61 * (1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168) * (1 + 4 / 128**2)  # q_b, kv_b, o with their scales
    assert whole.rank_bytes["attention"] - half.rank_bytes["attention"] == pytest.approx(heads / 2, rel=1e-9)


@pytest.mark.parametrize("case", ["v3", "v2_lite"])
def test_ranks_of_a_real_folder_hold_its_bytes(case: str, tmp_path: Path) -> None:
    """One rank holds what the files hold; four hold the routed experts once together and all else each."""
    write_family(tmp_path, case, 5)
    stored = sum(entry.end - entry.begin for entry in read_entries(tmp_path).values())
    whole, quarter = inspect(tmp_path), inspect(tmp_path, ep=4)
    assert whole.total_bytes == stored and whole.has_files and whole.fingerprint is not None
    for part, size in whole.rank_bytes.items():
        assert part == "MTP layer" or quarter.rank_bytes[part] * (4 if part == "routed experts" else 1) == size


def test_command_on_the_demo_model_and_on_a_config_alone(tmp_path: Path) -> None:
    """Plain lines into a pipe, without torch, in a process of its own."""
    code = "import sys; from services.doctor.__main__ import main; status = main(); assert 'torch' not in sys.modules; sys.exit(status)"

    def doctor(*arguments: str) -> str:
        command = [sys.executable, "-c", code, "checkpoint", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    demo = doctor(str(DEMO_MODEL), "--kv-dtype", "float32")
    assert "DeepseekV3ForCausalLM" in demo and "KV a token: 18,432 B" in demo and "\x1b" not in demo
    report = inspect(DEMO_MODEL, kv_dtype="float32")
    assert f"revision: {report.revision}\n" in demo and f"fingerprint: {report.fingerprint} " in demo
    v3 = doctor(str(write_config(tmp_path, V3)), "--ep", "128", "--gpu-memory", "141")
    assert "parameters: 671.03 B, 37.55 B active" in v3 and "KV a token: 70,272 B" in v3
    assert "weights of a rank, EP128 TP1: 24.62 GB" in v3 and "pages on a GPU, 141 GB: 22," in v3


def test_the_fingerprint_is_that_of_a_rank() -> None:
    """What the engines compare: same config, revision, layout."""
    import dataclasses

    from services.kv.layout import KvLayout, fingerprint
    from services.model.config import load_config
    from services.model.loader import revision
    from services.model.params import SAMPLER_VERSION

    config = load_config(DEMO_MODEL)
    layout = KvLayout(num_layers=config.num_hidden_layers, kv_lora_rank=512, rope_dim=64, dtype="float32")
    theirs = fingerprint(dataclasses.asdict(config), revision(DEMO_MODEL), layout, sampler_version=SAMPLER_VERSION)
    assert inspect(DEMO_MODEL, kv_dtype="float32").fingerprint == theirs


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_family(tmp_path, "v3", 6)
    (tmp_path / "model-00003-of-00004.safetensors").unlink()
    for arguments, sentence in [
        ([str(tmp_path)], "model-00003-of-00004.safetensors does not exist"),
        ([str(tmp_path / "config.json"), "--ep", "3"], "ep is 3 but it must divide n_routed_experts (8)"),
        ([str(tmp_path / "nothing")], "config.json does not exist"),
    ]:
        assert main(["checkpoint", *arguments]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith("doctor: ") and sentence in shown and shown.count("\n") == 1


@pytest.mark.parametrize("memory", ["nan", "inf", "1e300", "-5", "0", "much"])
def test_gpu_memory_is_checked(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "deploy/demo_model", "--gpu-memory", memory])
    assert ended.value.code == 2 and "--gpu-memory" in capsys.readouterr().err
