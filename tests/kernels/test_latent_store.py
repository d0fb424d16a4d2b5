import pytest
import torch

from kernels.latent_store import latent_store, pool_rows


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_entries_land_in_their_slots_and_nowhere_else(backend: str) -> None:
    pages = torch.full((5, 3, 4, 6), torch.nan)
    rows = pool_rows([[4, 1], [2]], [range(3, 6), range(0, 1)], num_layers=3, page_size=4)
    latent = torch.arange(16, dtype=torch.float32).view(4, 4)
    key_rope = -torch.arange(8, dtype=torch.float32).view(4, 2)
    latent_store(latent, key_rope, pages, rows[1], backend=backend)
    expected = torch.full_like(pages, torch.nan)
    for token, (page, slot) in enumerate([(4, 3), (1, 0), (1, 1), (2, 0)]):
        expected[page, 1, slot] = torch.cat((latent[token], key_rope[token]))
    assert torch.equal(pages.nan_to_num(99), expected.nan_to_num(99))


def test_rows_of_layers_follow_each_other_in_a_page() -> None:
    rows = pool_rows([[7]], [range(63, 64)], num_layers=2, page_size=64)
    assert rows.tolist() == [[7 * 2 * 64 + 63], [7 * 2 * 64 + 64 + 63]]


def test_rejects_strided_pages() -> None:
    with pytest.raises(AssertionError):
        latent_store(torch.zeros(1, 4), torch.zeros(1, 2), torch.zeros(2, 3, 4, 12)[..., :6], torch.zeros(1, dtype=torch.int64))
