"""On an NVIDIA GPU: real processes hold real memory; preflight names them, ends what was left behind, and waits for the memory."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from ray_eagle.preflight.freeing import free, stale
from ray_eagle.preflight.gpus import IDLE_BYTES, Holder, NodeGpus, describe, inspect
from ray_eagle.preflight.kernels import check_kernels, kernel_facts, library_archs, support
from ray_eagle.report.gpus import freed_words, node_json
from ray_eagle.serving import supervisor
from ray_eagle.serving.child import state_folder
from tests.processes import Start

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
GIB = 2**30
HOLD = (
    "import signal, sys, time, torch; {before}; x = torch.zeros(3 * 2**30, dtype=torch.uint8, device='cuda'); "
    "torch.cuda.synchronize(); print('up', flush=True); time.sleep(600)"
)
MEEK = HOLD.format(before="pass")
STUBBORN = HOLD.format(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def used() -> int:
    return inspect().gpus[0].reading.used


def on_gpu(node: NodeGpus, pid: int) -> Holder | None:
    return next((h for h in node.gpus[0].holders if h.process.pid == pid), None)


def await_memory(more_than: int) -> None:
    """A process that was orphaned has said its pid before it holds memory."""
    deadline = time.monotonic() + 120
    while used() < more_than:
        assert time.monotonic() < deadline, "the process took no memory"
        time.sleep(0.2)


@pytest.mark.parametrize(("program", "outcome"), [(MEEK, "ended"), (STUBBORN, "killed")])
def test_what_was_left_behind_is_named_and_ended_and_its_memory_free(
    start: Start, program: str, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = used()
    here = {"boot": supervisor.boot_id(), "processes": supervisor.namespace()}
    record = {**here, "mark": "left-over", "replica": 2**22, "replica_started": 1}  # a replica that is gone
    path = state_folder() / "left-over.json"
    path.write_text(json.dumps(record))
    process = start(program, mark="left-over", orphan=True)
    await_memory(before + 3 * GIB)
    node = inspect()
    holder = on_gpu(node, process.pid)
    with capsys.disabled():
        print(json.dumps(node_json(node), indent=1))
    assert holder, "found by NVML or by its open device files"
    assert holder.bytes is None or holder.bytes > 3 * GIB
    assert holder.standing.ours and holder.standing.stale
    assert "its replica is gone" in describe(holder)
    assert node.gpus[0].nobodys < 3 * GIB, "its memory is not nobody's"
    assert process.pid in [h.process.pid for h in stale(node)]

    freed = free([holder.process], term_s=3.0)
    with capsys.disabled():
        print(freed_words(freed))
    assert freed.outcomes == ((holder.process, outcome),)
    assert freed.left.gpus[0].reading.used < before + IDLE_BYTES
    assert on_gpu(freed.left, process.pid) is None
    assert freed.seconds < 20
    path.unlink()


def test_another_mans_process_is_named_and_left_alone(start: Start) -> None:
    process = start(MEEK, mark="")
    holder = on_gpu(inspect(), process.pid)
    assert holder
    assert not holder.standing.ours and not holder.standing.stale
    assert process.pid not in [h.process.pid for h in stale(inspect())]


def test_the_driver_and_the_gpu_are_read() -> None:
    node = inspect()
    reading = node.gpus[0].reading
    assert reading.capability == torch.cuda.get_device_capability(0)
    assert reading.name == torch.cuda.get_device_name(0)
    assert abs(reading.total - torch.cuda.get_device_properties(0).total_memory) < 4 * GIB
    assert node.driver.version.count(".") >= 1
    assert (
        tuple(int(n) for n in (torch.version.cuda or "0.0").split(".")[:2]) <= node.driver.cuda
        or node.driver.cuda[0] >= 12
    )


def test_installed_kernels_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    facts = kernel_facts(sys.executable)
    capability = torch.cuda.get_device_capability(0)
    findings = check_kernels("", facts, {capability: "this GPU"}, inspect().driver.cuda)
    with capsys.disabled():
        print(facts)
    assert all(finding.level != "error" for finding in findings), findings
    assert set(facts.torch_archs) == set(torch.cuda.get_arch_list())
    began = time.monotonic()
    archs = library_archs(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so")
    assert support(archs, capability) == support(facts.torch_archs, capability) != "none"
    assert time.monotonic() - began < 10
