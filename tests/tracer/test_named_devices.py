"""Every form in which a script names a device, and what PyTorch says of what it gets there."""

from pathlib import Path

import pytest
import torch

import rooftrace as rt

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

HEAD = """
import copy, io, pickle, sys, threading
import torch
from torch import nn
from torch.nn.utils import rnn

host, x = torch.ones(2, 3), torch.ones(2, 3, device="cuda")
sparse = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))
shapes = torch.empty(2, 3, device="meta")
weights, own = nn.Linear(2, 2).state_dict(), nn.Linear(2, 2).cuda().state_dict()

def under(mode, make):
    with mode:
        return make()

def default(device, make):
    torch.set_default_device(device)
    try:
        return make()
    finally:
        torch.set_default_device(None)

def read(item, where=None, only=True):
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, map_location=where, weights_only=only)

def filled(module, weights, **kw):
    module.load_state_dict(copy.deepcopy(weights), **kw)
    return module

def in_thread(make):
    made = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made[0]

def trained(module, device="cpu"):
    module(torch.ones(1, 3, device=device)).sum().backward()
    return module

def seen(run):
    told = []
    run(lambda tensor: told.append(tensor.device) or tensor)
    return told[-1]

def saved(tell):
    with torch.autograd.graph.saved_tensors_hooks(tell, lambda tensor: tensor):
        x.clone().requires_grad_().exp()

def clipped():
    linear = trained(nn.Linear(3, 2).cuda(), "cuda")
    norm = nn.utils.clip_grad_norm_(linear.parameters(), 1.0, foreach=True)
    return [norm, linear.weight.grad]

def places(item):
    if isinstance(item, nn.Module):
        item = [*item.parameters(), *item.buffers()]
    if isinstance(item, (list, tuple)):
        return {place for part in item for place in places(part)}
    if isinstance(item, dict):
        return places(list(item.values()))
    return {str(item if isinstance(item, torch.device) else item.device)}
"""

ON_DEVICE = """
torch.func.hessian(lambda a: (a**2).sum())(x[0]) | torch.func.jvp(torch.sin, (x,), (x,))[1]
nn.Linear(2, 2).to(x) | nn.Linear(2, 2).to(tensor=x) | nn.Linear(2, 2).to(0)
nn.Linear(2, 2).to(device=0) | nn.Linear(2, 2).to("cuda", torch.half)
nn.Linear(2, 2).to(device="cuda:0", dtype=torch.half) | nn.Linear(2, 2).cuda(device=0)
nn.LSTM(2, 2).to_empty(device="cuda") | nn.Linear(2, 2, device="meta").to_empty(device=0)
nn.Linear(2, 2, device=0) | host.to(x) | host.to(0) | host.to("cuda", torch.half, True, True)
host.to(device=torch.device(0)) | x.to() | x.to(torch.half) | host.cuda(0)
host.cuda(device="cuda:0", non_blocking=True) | host.type("torch.cuda.HalfTensor") | host.type_as(x)
x.half() | torch.tensor([1, 2], device=0) | torch.as_tensor(host, device="cuda") | torch.asarray(x)
torch.from_numpy(host.numpy()).cuda() | torch.cuda.FloatTensor() | torch.cuda.FloatTensor([1.0])
torch.Tensor(x) | torch.scalar_tensor(1.0, device="cuda") | x.new_zeros(2) | x.new_tensor([1.0])
x.new([1.0]) | x.new(2) | torch.ones_like(host, device=0) | torch.full_like(x, 2.0)
torch.empty_like(shapes, device="cuda") | shapes.new_zeros(2, device=0) | torch.rand_like(x)
torch.randint_like(x, 5) | under(torch.device("cuda"), lambda: nn.Linear(2, 2))
under(torch.device(0), lambda: torch.arange(3)) | default(0, lambda: torch.eye(2))
under(torch.cuda.device(0), lambda: torch.ones(1, device="cuda"))
default("cpu", lambda: under(torch.device("cuda"), lambda: torch.rand(2)))
default("cuda", lambda: torch.as_tensor(host))
default("cuda", lambda: nn.Transformer(4, 2, 1, 1, 8)) | default("cuda", torch.get_default_device)
in_thread(lambda: default("cuda", lambda: torch.zeros(2)))
in_thread(lambda: nn.Linear(2, 2).to(device="cuda")) | in_thread(lambda: x.device)
torch.Generator("cuda") | torch.Generator(device=0).clone_state()
copy.deepcopy(torch.Generator("cuda")) | pickle.loads(pickle.dumps(torch.Generator("cuda")))
read(x) | read(own) | read(host, "cuda") | read(weights, {"cpu": "cuda:0"})
read(weights, lambda s, place: s.cuda(0)) | read(nn.Linear(2, 2).cuda(), only=False) | copy.copy(x)
copy.deepcopy(x) | copy.deepcopy(nn.Linear(2, 2).cuda()) | pickle.loads(pickle.dumps(x))
pickle.loads(pickle.dumps(nn.Linear(2, 2).cuda())) | filled(nn.Linear(2, 2, device="cuda"), weights)
filled(nn.Linear(2, 2, device="meta"), own, assign=True)
filled(nn.Linear(2, 2, device="meta"), weights, assign=True).cuda() | sparse.cuda()
sparse.to(device=0) | sparse.cuda() + sparse.cuda() | sparse.cuda().coalesce().values()
x.to_sparse() | host.to_sparse_csr().cuda()
torch.nested.nested_tensor([host[0], host[1]], layout=torch.jagged, device="cuda")
rnn.pack_padded_sequence(torch.ones(3, 2, 1), [3, 2]).to("cuda").data | x.untyped_storage()
x.untyped_storage().clone() | torch.UntypedStorage(4, device="cuda") | x.storage()
x.share_memory_() | nn.Parameter(x) | nn.Buffer(x) | nn.LazyLinear(2).cuda().weight
nn.LazyLinear(2, device="cuda").weight | nn.Linear(2, 2).cuda().cpu().cuda() | clipped()
seen(lambda tell: torch.vmap(tell)(x))
seen(lambda tell: torch.func.grad(lambda a: tell(a).sum())(x)) | seen(saved)
torch.accelerator.current_stream() | trained(nn.Linear(3, 2)).cuda().weight.grad
trained(nn.Linear(3, 2).cuda(), "cuda").weight.grad | torch.jit.script(nn.Linear(3, 2).cuda())(x)
"""

ON_HOST = """
nn.Linear(2, 2).cuda().cpu() | nn.Linear(2, 2).cuda().to(device="cpu")
nn.BatchNorm1d(2).cuda().to("cpu", non_blocking=True)
trained(nn.Linear(3, 2).cuda(), "cuda").cpu().weight.grad
trained(nn.Linear(3, 2).cuda().cpu()).weight.grad | x.to(host) | x.type(torch.FloatTensor)
torch.empty_like(x, device="cpu") | x.new_zeros(2, device="cpu") | torch.asarray(x, device="cpu")
torch.empty_like(shapes, device="cpu")
under(torch.device("cuda"), lambda: torch.ones(2, device="cpu"))
default("cuda", lambda: under(torch.device("cpu"), lambda: nn.Linear(2, 2)))
default("cuda", lambda: in_thread(lambda: torch.ones(2)))
default("cuda", lambda: host.new_zeros(2)) | default("cuda", lambda: torch.from_numpy(host.numpy()))
read(x, "cpu") | read(own, torch.device("cpu")) | read(own, {"cuda:0": "cpu"})
read(own, lambda storage, place: storage) | read(nn.Linear(2, 2).cuda(), "cpu", False)
filled(nn.Linear(2, 2), own) | filled(nn.Linear(2, 2, device="cuda"), weights, assign=True)
sparse.cuda().cpu() | x.untyped_storage().cpu() | host.pin_memory() | torch.Generator()
torch.cuda.get_rng_state()
rnn.pack_padded_sequence(torch.ones(3, 2, 1, device="cuda"), [3, 2]).batch_sizes
"""

ON_META = """
shapes | nn.Linear(2, 2, device="meta") | nn.Linear(2, 2).to(device="meta")
nn.Linear(2, 2).cuda().to("meta") | x.to("meta") | host.to("meta") | shapes + 1 | shapes.clone()
shapes.new_zeros(2) | torch.ones_like(shapes) | nn.Linear(2, 2, device="meta").half()
nn.Linear(3, 2, device="meta")(shapes) | copy.deepcopy(nn.Linear(2, 2, device="meta"))
under(torch.device("meta"), lambda: nn.Transformer(4, 2, 1, 1, 8))
nn.Linear(2, 2).to_empty(device="meta") | shapes.untyped_storage()
nn.LazyLinear(2, device="meta").weight | torch.block_diag(shapes, shapes)
nn.Linear(2, 2, device="meta").state_dict()
"""

TAIL = """
for want, table in (("cuda:0", ON_DEVICE), ("cpu", ON_HOST), ("meta", ON_META)):
    for form in table.replace("\\n", "|").split("|"):
        if form.strip():
            got = places(eval(form))
            if got != {want}:
                print(form.strip(), got, file=out)
assert x.is_cuda and not x.is_meta and x.get_device() == torch.get_device(x) == 0 == x.device.index
assert "device='cuda:0'" in repr(x) and x.type() == "torch.cuda.FloatTensor"
assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(host, torch.cuda.FloatTensor)
for leave in (shapes.cuda, shapes.cpu, nn.Linear(2, 2, device="meta").cuda):
    try:
        leave()
    except NotImplementedError as error:
        assert "Cannot copy out of meta tensor; no data!" in str(error)
    else:
        print("numbers out of meta", file=out)
before, big = torch.cuda.memory_allocated(), nn.Linear(64, 64).cuda()
assert torch.cuda.memory_allocated() - before == 4 * (64 * 64 + 64)
assert big.cpu() is big and torch.cuda.memory_allocated() == before
one = torch.tensor(2.0, device="cuda")
assert host.clone().fill_(one).tolist() == [[2.0] * 3] * 2
assert host.clone().masked_fill_(host > 0, one).tolist() == [[2.0] * 3] * 2
assert host.clone().index_put_((torch.tensor([1]),), one).tolist() == [[1.0] * 3, [2.0] * 3]
assert torch.zeros((), dtype=torch.int64).copy_(3).item() == 3
for write in ("add_", "mul_", "pow_", "eq_", "clamp_min_"):
    try:
        getattr(host.clone(), write)(one)
    except RuntimeError as error:
        assert "on the same device" in str(error)
    else:
        print(write, file=out)
print("done", file=out)
out.close()
"""


@pytest.mark.slow
def test_what_a_script_gets_is_where_it_said(tmp_path: Path) -> None:
    script, out = tmp_path / "forms.py", tmp_path / "out"
    tables = f"ON_DEVICE, ON_HOST, ON_META = {ON_DEVICE!r}, {ON_HOST!r}, {ON_META!r}\n"
    script.write_text(f"{HEAD}\nout = open({str(out)!r}, 'w')\n{tables}{TAIL}")
    rt.run([str(script)], chip="l4", steps=None)
    assert out.read_text() == "done\n"
