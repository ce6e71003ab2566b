# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Python interface of NCCL (nccl4py, nccl.core) on MoECCL's shim, with CUDA memory: every host function of its Communicator.

Needs Python packages: pip install nccl4py cuda-bindings numpy. Without a GPU the emulated driver takes the place of CUDA's, under its name:

    python3 tests/shim/nccl4py_test.py [NAME...]

finds the shim and the emulation in build/. BUILD names another build folder. DEVICE=cuda runs it on this machine's GPUs."""
import contextlib
import multiprocessing
import os
import pathlib
import queue
import sys
import tempfile
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = 4


def restart_with_libraries():
    """Sets what must be set before Python starts: the preloaded shim, and the emulated driver as libcuda.so.1."""
    build = pathlib.Path(os.environ.get("BUILD", ROOT / "build")).resolve()
    os.environ["NCCL4PY_READY"] = "1"
    os.environ["LD_PRELOAD"] = str(build / "shim/nccl/libmoeccl-nccl.so")
    os.environ.setdefault("MOECCL_TIMEOUT_MS", "20000")
    if os.environ.get("DEVICE") != "cuda":
        emulated = build / "tests/support/cuda_emulation/libemulated_cuda.so"
        folder = tempfile.mkdtemp(prefix="moeccl_nccl4py_")
        os.symlink(emulated, os.path.join(folder, "libcuda.so.1"))
        os.environ["NCCL4PY_FOLDER"] = folder
        os.environ["MOECCL_CUDA_DRIVER"] = str(emulated)
        os.environ["LD_LIBRARY_PATH"] = folder + ":" + os.environ.get("LD_LIBRARY_PATH", "")
    os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__" and "NCCL4PY_READY" not in os.environ:
    restart_with_libraries()

import numpy as np
import nccl.core as nccl
from cuda.bindings import driver
from cuda.core import Device

TYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64]


def ok(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) == 2 else result[1:]


class Array:
    """A NumPy array's copy in memory of ncclMemAlloc, which nccl4py reads by __cuda_array_interface__."""

    def __init__(self, values):
        self.shape, self.dtype = values.shape, values.dtype
        self.memory = nccl.mem_alloc(max(values.nbytes, 1))
        self.put(values)

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (int(self.memory.handle), False), "version": 3, "strides": None}

    def put(self, values):
        values = np.ascontiguousarray(values)
        ok(driver.cuMemcpyHtoD(int(self.memory.handle), values.ctypes.data, values.nbytes))

    def get(self):
        ok(driver.cuCtxSynchronize())
        values = np.empty(self.shape, self.dtype)
        ok(driver.cuMemcpyDtoH(values.ctypes.data, int(self.memory.handle), values.nbytes))
        return values


def zeros(n, dtype=np.float32):
    return Array(np.zeros(n, dtype))


def of_rank(rank, n=1000, dtype=np.float32):
    return (np.arange(n) % 13 + rank).astype(dtype)


def same(array, wanted):
    np.testing.assert_array_equal(array.get(), wanted)


def check_sum(comm, rank, ranks, **options):
    """Sums over `comm`, which holds `ranks` of the first communicator, of which this is number `rank`."""
    out = zeros(1000)
    comm.allreduce(Array(of_rank(rank)), out, nccl.SUM, **options)
    same(out, sum(of_rank(r) for r in ranks))


@contextlib.contextmanager
def raises(kind, text):
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")


def case_reductions(comm, rank, n, box):
    everyone = range(n)
    for dtype in TYPES:
        mine = of_rank(rank, dtype=dtype)
        all_ranks = np.stack([of_rank(r, dtype=dtype) for r in everyone])
        for op, wanted in [(nccl.SUM, all_ranks.sum(0)), (nccl.MAX, all_ranks.max(0)), (nccl.MIN, all_ranks.min(0)), (nccl.PROD, all_ranks.prod(0, dtype=dtype))]:
            if op == nccl.PROD and dtype == np.float16:
                continue  # its rounding depends on the order
            out = zeros(1000, dtype)
            comm.allreduce(Array(mine), out, op)
            same(out, wanted.astype(dtype))
        in_place = Array(mine)
        comm.reduce(in_place, in_place if rank == 1 else None, nccl.SUM, root=1)
        if rank == 1:
            same(in_place, all_ranks.sum(0).astype(dtype))
        part = zeros(1000 // n, dtype)
        comm.reduce_scatter(Array(mine), part, nccl.SUM)
        same(part, all_ranks.sum(0).astype(dtype).reshape(n, -1)[rank])
    out = zeros(1000, np.float64)
    comm.allreduce(Array(of_rank(rank, dtype=np.float64)), out, nccl.AVG)
    same(out, np.mean([of_rank(r, dtype=np.float64) for r in everyone], 0))


def case_scaled_sums(comm, rank, n, box):
    total = sum(of_rank(r) for r in range(n))
    for scalar in [0.5, np.array([0.25], np.float32), Array(np.array([2], np.float32))]:
        op = comm.create_pre_mul_sum(scalar, nccl.FLOAT32)
        out = zeros(1000)
        comm.allreduce(Array(of_rank(rank)), out, op)
        factor = scalar.get()[0] if isinstance(scalar, Array) else np.asarray(scalar).ravel()[0]
        same(out, total * np.float32(factor))
        op.close()


def case_moves(comm, rank, n, box):
    mine = of_rank(rank)
    out = zeros(1000)
    comm.broadcast(Array(mine) if rank == 2 else None, out, root=2)
    same(out, of_rank(2))
    blocks = np.concatenate([of_rank(100 * rank + r, 50) for r in range(n)])
    out = zeros(50 * n)
    comm.alltoall(Array(blocks), out)
    same(out, np.concatenate([of_rank(100 * r + rank, 50) for r in range(n)]))
    out = zeros(1000 * n)
    comm.allgather(Array(mine), out)
    same(out, np.concatenate([of_rank(r) for r in range(n)]))
    out = zeros(1000 * n)
    comm.gather(Array(mine), out if rank == 0 else None, root=0)
    if rank == 0:
        same(out, np.concatenate([of_rank(r) for r in range(n)]))
    part = zeros(50)
    comm.scatter(Array(blocks) if rank == 3 else None, part, root=3)
    same(part, of_rank(300 + rank, 50))


def case_messages(comm, rank, n, box):
    stream = Device().create_stream()
    right, left = (rank + 1) % n, (rank - 1) % n
    for count in (1, 1000, 300_000):
        mine, out = Array(of_rank(rank, count)), zeros(count)
        with nccl.group():
            comm.send(mine, right, stream=stream)
            comm.recv(out, left, stream=stream)
        stream.sync()
        same(out, of_rank(left, count))
    mine, of_all = Array(of_rank(rank, 10)), [zeros(10) for _ in range(n)]
    with nccl.group():
        for r in range(n):
            comm.send(mine, r, stream=stream)
            comm.recv(of_all[r], r, stream=stream)
    stream.sync()
    for r in range(n):
        same(of_all[r], of_rank(r, 10))


def case_settings(comm, rank, n, box):
    assert (comm.nranks, comm.rank) == (n, rank)
    assert comm.device.device_id == Device().device_id
    p = comm.properties
    assert (p.rank, p.n_ranks, p.cuda_dev) == (rank, n, comm.device.device_id), p
    assert (comm.team_world.n_ranks, comm.team_world.rank) == (n, rank)
    lsa = comm.team_lsa
    assert comm.team_rank_to_world(lsa, lsa.rank) == rank
    assert comm.get_async_error() == 0
    assert f"rank={rank}/{n}" in repr(comm)
    for stat in nccl.NcclCommMemStat:
        assert comm.get_mem_stat(stat) >= 0
    assert len(list(nccl.params)) == len(nccl.params)
    nccl.dump_params()
    check_sum(comm, rank, range(n), config=nccl.NCCLCollConfig())


def case_groups_of_ranks(comm, rank, n, box):
    half = comm.split(color=rank % 2, key=-rank)
    assert (half.nranks, half.rank) == (n // 2, (n - 1 - rank) // 2)
    check_sum(half, rank, range(rank % 2, n, 2))
    half.finalize()
    half.destroy()
    none = comm.split(color=None if rank == 0 else 1)
    assert none.is_valid == (rank != 0)
    if rank != 0:
        assert none.nranks == n - 1
        none.destroy()
    if rank != 2:
        rest = comm.shrink([2])
        assert rest.nranks == n - 1
        check_sum(rest, rank, (r for r in range(n) if r != 2))
        rest.destroy()


def case_growth(comm, rank, n, box):
    part = comm.split(color=0 if rank < n - 1 else None)
    if rank < n - 1:
        if rank == 1:
            uid = part.get_unique_id()
            box.put(bytes(uid))
            whole = part.grow(n, uid)
        else:
            whole = part.grow(n)
    else:
        whole = nccl.Communicator().grow(n, nccl.UniqueId.from_bytes(box.get()), rank=rank)
    assert (whole.nranks, whole.rank) == (n, rank)
    check_sum(whole, rank, range(n))
    whole.destroy()
    part.destroy()


def case_registered_memory(comm, rank, n, box):
    x, out = Array(of_rank(rank)), zeros(1000)
    handles = [comm.register_buffer(x), comm.register_buffer(out)]
    comm.allreduce(x, out, nccl.SUM)
    same(out, sum(of_rank(r) for r in range(n)))
    for handle in handles:
        handle.close()
    comm.suspend()
    comm.resume()
    comm.allreduce(x, out, nccl.SUM)
    same(out, sum(of_rank(r) for r in range(n)))


def case_windows(comm, rank, n, box):
    room = zeros(1000 * n)
    window = comm.register_window(room)
    assert window.is_valid
    if not comm.host_rma_support:
        return
    mine = Array(of_rank(rank))
    for peer in range(n):
        if peer != rank:
            comm.put_signal(mine, peer, window, 1000 * rank)
    comm.wait_signal([nccl.WaitSignalDesc(peer=p) for p in range(n) if p != rank])
    got = room.get().reshape(n, 1000)
    for r in range(n):
        np.testing.assert_array_equal(got[r], of_rank(r) if r != rank else 0)
    window.close()


def case_mistakes(comm, rank, n, box):
    with raises(nccl.NcclInvalid, "mismatch"):
        comm.allreduce(Array(of_rank(rank)), zeros(10), nccl.SUM)
    with raises(Exception, "nvalid"):
        comm.send(Array(of_rank(rank)), n + 3)
    assert comm.get_last_error()
    check_sum(comm, rank, range(n))


def case_nonblocking(comm, rank, n, box):
    if rank == 0:
        uid = nccl.get_unique_id()
        for _ in range(n - 1):
            box.put(bytes(uid))
    else:
        uid = nccl.UniqueId.from_bytes(box.get())
    other = nccl.Communicator.init(n, rank, uid, nccl.NCCLConfig(blocking=False, comm_name="later"))
    while other.get_async_error() == 7:  # ncclInProgress
        pass
    assert other.get_async_error() == 0
    out = zeros(1000)
    other.allreduce(Array(of_rank(rank)), out, nccl.SUM)
    while other.get_async_error() == 7:
        pass
    same(out, sum(of_rank(r) for r in range(n)))
    other.abort()


CASES = {name[5:]: case for name, case in list(globals().items()) if name.startswith("case_")}


def rank_main(rank, uid, names, box, results):
    name = "init"
    try:
        Device(rank % len(Device.get_all_devices())).set_current()
        comm = nccl.Communicator.init(RANKS, rank, nccl.UniqueId.from_bytes(uid))
        for case in names:
            name = case
            CASES[name](comm, rank, RANKS, box)
            results.put((rank, name, None))
        comm.finalize()
        comm.destroy()
        results.put((rank, "the end", None))
    except BaseException:
        results.put((rank, name, traceback.format_exc()))


def main():
    names = sys.argv[1:] or list(CASES)
    context = multiprocessing.get_context("spawn")
    box, results = context.Queue(), context.Queue()
    uid = bytes(nccl.get_unique_id())
    ranks = [context.Process(target=rank_main, args=(r, uid, names, box, results), daemon=True) for r in range(RANKS)]
    for process in ranks:
        process.start()
    left = {name: RANKS for name in [*names, "the end"]}
    while left:
        try:
            rank, name, failure = results.get(timeout=120)
        except queue.Empty:
            sys.exit(f"no news for 120 s; left: {left}; exit codes: {[process.exitcode for process in ranks]}")
        if failure is not None:
            sys.exit(f"rank {rank} in {name}:\n{failure}")
        left[name] -= 1
        if left[name] == 0:
            del left[name]
            print("ok", name)
    for process in ranks:
        process.join(20)
    codes = [process.exitcode for process in ranks]
    if codes != [0] * RANKS:
        sys.exit(f"the ranks' processes ended with {codes} (None: not at all)")


if __name__ == "__main__":
    try:
        main()
    finally:
        folder = os.environ.get("NCCL4PY_FOLDER")
        if folder:
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, "libcuda.so.1"))
                os.rmdir(folder)
