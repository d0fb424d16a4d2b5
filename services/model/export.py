"""A model folder written back as plain fp32 safetensors, as `transformers` reads it: for its use as an oracle and base line."""

import json
from pathlib import Path

from safetensors.torch import save_file

from services.model.checkpoint import SINGLE_NAME
from services.model.config import load_config
from services.model.families import FAMILIES
from services.model.loader import load_tensors
from services.model.names import model_shapes


def write_fp32_folder(folder: Path, out: Path) -> None:
    """Load `folder`, write its model (FP8 dequantised, MTP layer left out) and config to the new folder `out`."""
    config = load_config(folder)
    names = model_shapes(config)
    tensors = load_tensors(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config", None)
    architecture = FAMILIES[config.model_type].architecture
    model_type = "deepseek_v3" if architecture == "DeepseekV3ForCausalLM" else config.model_type  # it has no class for kimi_k2
    raw |= {"num_nextn_predict_layers": 0, "torch_dtype": "float32", "architectures": [architecture], "model_type": model_type}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    save_file({name: tensors[name] for name in names}, out / SINGLE_NAME, metadata={"format": "pt"})
