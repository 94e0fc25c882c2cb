"""What torch's allocator keeps of a GPU goes back to others where they lack it, and stays where they do not."""

import pytest
import torch
from tinker_local.backend.spare_memory import cached_bytes, give_back_at_rest

KEPT = 2**30


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_at_rest_gives_its_cache_back_where_less_than_as_much_is_free_beside_what_is_spared() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    used = torch.ones(2**20, device=device)
    unused = torch.empty(KEPT, dtype=torch.uint8, device=device)
    del unused
    kept, (free, _) = cached_bytes(device), torch.cuda.mem_get_info(device)
    assert kept >= KEPT

    give_back_at_rest(spare=free - kept - 2**28)  # others have as much beside what is spared
    assert cached_bytes(device) == kept

    give_back_at_rest(spare=free - kept + 2**28)
    assert torch.cuda.mem_get_info(device)[0] >= free + KEPT  # parts of segments in use stay
    assert bool((used == 1).all())
