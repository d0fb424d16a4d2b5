"""Sizes of a page, and which ranks may exchange one (B55)."""

import msgspec
import pytest

from services.kv.layout import PAGE_SIZE, KvLayout, compatibility, fingerprint

V3 = KvLayout(num_layers=61, kv_lora_rank=512, rope_dim=64, dtype="bfloat16")
CONFIG = {"num_hidden_layers": 61, "rope_theta": 10000.0, "rope_scaling": {"factor": 40}, "q_lora_rank": None}


def test_sizes_of_v3():
    assert (PAGE_SIZE, V3.width, V3.token_bytes, V3.page_bytes) == (64, 576, 70_272, 4_497_408)
    assert [(field.name, field.offset, field.size) for field in V3.fields] == [("latent", 0, 512), ("rope_key", 512, 64)]


def test_fingerprint_is_stable_and_ignores_order():
    one = fingerprint(CONFIG, "rev", V3, sampler_version=1)
    assert one == fingerprint(dict(reversed(CONFIG.items())), "rev", V3, sampler_version=1)
    assert len(one) == 32


CHANGES = {
    "num_hidden_layers": {"model_config": CONFIG | {"num_hidden_layers": 60}},
    "rope_scaling": {"model_config": CONFIG | {"rope_scaling": {"factor": 20}}},
    "revision": {"revision": "other"},
    "page.layers": {"layout": msgspec.structs.replace(V3, num_layers=62)},
    "page.fields": {"layout": msgspec.structs.replace(V3, rope_dim=32)},
    "page.dtype": {"layout": msgspec.structs.replace(V3, dtype="float32")},
    "sampler_version": {"sampler_version": 2},
    "rope_pairing": {"rope_pairing": "halves"},
    "num_mtp_layers": {"num_mtp_layers": 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_changes_the_fingerprint_and_is_named(name):
    base = {"model_config": CONFIG, "revision": "rev", "layout": V3, "sampler_version": 1}
    here, there = compatibility(**base), compatibility(**(base | CHANGES[name]))
    assert here.fingerprint != there.fingerprint
    difference = here.difference(there)
    assert name in difference and here.values[name] in difference and there.values[name] in difference
    assert here.difference(here) == ""
