"""On a GPU too, all kernels that a run needs are built at registration."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowp

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture
def nccl(tmp_path):
    """A world of this process alone, where there is none yet."""
    if dist.is_initialized():
        yield
        return
    store = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", ["aps", "local"])
def test_no_kernel_is_built_during_training(nccl, scale, dtype):
    """40 layers in a few buckets, which DDP lays anew after its first step."""
    lowp.set_kernel_policy("auto")
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).to("cuda", dtype)
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.2)
    handle = lowp.compress_gradients(ddp, "e4m3fn", scale=scale)
    before = lowp.kernel_info()["built"]
    for _ in range(40):
        ddp(torch.randn(8, 64, device="cuda", dtype=dtype)).square().mean().backward()
    assert lowp.kernel_info()["built"] == before
    handle.remove()
