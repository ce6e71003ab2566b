// SPDX-License-Identifier: Apache-2.0
#include "perf/versus/versus.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "perf/common/fail.h"
#include "perf/common/progress.h"
#include "perf/common/stats.h"

namespace perf {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMostIterations = 2000;
constexpr int kWarmUps = 160;
constexpr int kLooks = 3;
constexpr size_t kWarmUpTo = 4 << 20;  // bytes
constexpr size_t kFloatsPer16Bytes = 4;

// Returns nccl-tests' sizes: the smallest one times powers of the given factor, and the largest itself.
std::vector<size_t> sizes(const VersusOptions& o) {
  std::vector<size_t> list;
  for (size_t size = o.min_bytes; size < o.max_bytes; size *= static_cast<size_t>(o.step_factor)) list.push_back(size);
  list.push_back(o.max_bytes);
  return list;
}

// Returns how many floats go from one rank to another.
size_t block_floats(Split split, int from, int to, int n, size_t floats) {
  if (n == 1) return floats;
  double share = 1.0 / n;
  if (split == Split::kDistance) {
    share = static_cast<double>((to - from + n) % n) / (static_cast<double>(n) * (n - 1) / 2);
  } else if (split == Split::kZipf) {
    double all = 0;
    for (int r = 0; r < n; ++r) all += 1.0 / (r + 1);
    share = 1.0 / (to + 1) / all;
  }
  return static_cast<size_t>(static_cast<double>(floats) * share) / kFloatsPer16Bytes * kFloatsPer16Bytes;
}

void fill_blocks(Exchange& e, Split split, int rank, int n) {
  const size_t floats = e.count * static_cast<size_t>(n);
  size_t sent = 0, received = 0;
  for (int peer = 0; peer < n; peer++) {
    e.send_counts.push_back(block_floats(split, rank, peer, n, floats));
    e.recv_counts.push_back(block_floats(split, peer, rank, n, floats));
    e.send_displs.push_back(sent);
    e.recv_displs.push_back(received);
    sent += e.send_counts.back();
    received += e.recv_counts.back();
  }
  e.n_send = sent;
  e.n_recv = received;
}

Exchange make_exchange(VersusOp op, size_t bytes, Split split, const Rival& rival) {
  const size_t n = static_cast<size_t>(rival.n_ranks());
  const size_t block = bytes / sizeof(float) / n / kFloatsPer16Bytes * kFloatsPer16Bytes;
  Exchange e = {};
  e.op = op;
  e.split = split;
  e.bytes = bytes;
  e.count = op == VersusOp::kAllReduce ? bytes / sizeof(float) : block;
  e.n_send = op == VersusOp::kAllReduce || op == VersusOp::kAllGather ? e.count : e.count * n;
  e.n_recv = op == VersusOp::kAllReduce || op == VersusOp::kReduceScatter ? e.count : e.count * n;
  if (op == VersusOp::kAllToAllv) fill_blocks(e, split, rival.rank(), rival.n_ranks());
  return e;
}

float sent_value(int rank, size_t index) { return static_cast<float>(rank + 1 + static_cast<int>(index % 7)); }

bool right(const Exchange& e, int rank, int n) {
  const auto reduced = [n](size_t index) {
    return static_cast<float>(n * (n + 1) / 2 + n * static_cast<int>(index % 7));
  };
  for (size_t i = 0; i < e.n_recv; i++) {
    const size_t source = e.count == 0 ? 0 : i / e.count, place = e.count == 0 ? 0 : i % e.count;
    float expected = 0;
    switch (e.op) {
      case VersusOp::kAllReduce:
        expected = reduced(i);
        break;
      case VersusOp::kReduceScatter:
        expected = reduced(static_cast<size_t>(rank) * e.count + i);
        break;
      case VersusOp::kAllGather:
        expected = sent_value(static_cast<int>(source), place);
        break;
      case VersusOp::kAllToAll:
        expected = sent_value(static_cast<int>(source), static_cast<size_t>(rank) * e.count + place);
        break;
      case VersusOp::kAllToAllv: {
        const auto after = std::upper_bound(e.recv_displs.begin(), e.recv_displs.end(), i);
        const int from = static_cast<int>(after - e.recv_displs.begin()) - 1;
        size_t displ = 0;  // of this rank's block in the source's buffer
        for (int peer = 0; peer < rank; peer++)
          displ += block_floats(e.split, from, peer, n, e.count * static_cast<size_t>(n));
        expected = sent_value(from, displ + i - e.recv_displs[static_cast<size_t>(from)]);
        break;
      }
    }
    if (e.recv[i] != expected) return false;
  }
  return true;
}

void verify(const Exchange& e, Rival& rival, const char* who, const std::function<void()>& run) {
  for (size_t i = 0; i < e.n_send; i++) e.send[i] = sent_value(rival.rank(), i);
  std::fill(e.recv, e.recv + e.n_recv, -1.0f);
  rival.barrier();
  run();
  if (!right(e, rival.rank(), rival.n_ranks()))
    fail(std::string(who) + " gives a wrong result: " + op_name(e.op) + " of " + std::to_string(e.bytes) +
         " bytes on rank " + std::to_string(rival.rank()));
}

moecclResult_t run_moeccl(const Exchange& e, moecclComm_t comm) {
  switch (e.op) {
    case VersusOp::kAllReduce:
      return moecclAllReduce(e.send, e.recv, e.count, moecclFloat32, moecclSum, comm, nullptr);
    case VersusOp::kReduceScatter:
      return moecclReduceScatter(e.send, e.recv, e.count, moecclFloat32, moecclSum, comm, nullptr);
    case VersusOp::kAllGather:
      return moecclAllGather(e.send, e.recv, e.count, moecclFloat32, comm, nullptr);
    case VersusOp::kAllToAll:
      return moecclAllToAll(e.send, e.recv, e.count, moecclFloat32, comm, nullptr);
    case VersusOp::kAllToAllv:
      break;
  }
  return moecclAllToAllv(e.send, e.send_counts.data(), e.send_displs.data(), e.recv, e.recv_counts.data(),
                         e.recv_displs.data(), moecclFloat32, comm, nullptr);
}

// Runs one turn of one library and returns the slowest rank's time per operation. The first operation finds the other
// library's data in the caches and is not timed.
double turn_us(Rival& rival, int iterations, const std::function<void()>& run) {
  run();
  rival.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < iterations; i++) run();
  const double elapsed = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  return rival.max(elapsed / iterations);
}

// `e` is MoECCL's exchange and `theirs_e` that of the other library; they differ in their buffers at most.
void measure(const VersusOptions& options, Rival& rival, moecclComm_t comm, const Exchange& e, const Exchange& theirs_e,
             VersusPoint& point) {
  const std::function<void()> theirs = [&] { rival.run(); };
  const std::function<void()> ours = [&] { check(run_moeccl(e, comm), op_name(e.op), rival.rank(), comm); };
  rival.prepare(theirs_e);
  verify(theirs_e, rival, rival.name(), theirs);
  verify(e, rival, "MoECCL", ours);
  // Zeros, because a library that reduces in place would otherwise grow its sums from turn to turn.
  for (const Exchange* each : {&e, &theirs_e}) {
    std::fill(each->send, each->send + each->n_send, 0.0f);
    std::fill(each->recv, each->recv + each->n_recv, 0.0f);
  }
  // Run as a program that has run for a while: MoECCL tries plans in the first operations of a size
  // (docs/calibration.md).
  if (e.bytes <= kWarmUpTo)
    for (const auto* run : {&theirs, &ours}) (void)turn_us(rival, kWarmUps, *run);
  // Each library's turn lasts about as long, however different their speeds are.
  const auto iterations = [&](const std::function<void()>& run) {
    return std::clamp(static_cast<int>(options.turn_us / turn_us(rival, 3, run)), 1, kMostIterations);
  };
  const int their_iterations = iterations(theirs), our_iterations = iterations(ours);
  for (int i = 0; i < options.repetitions; i++) {
    point.rival_turns.push_back(turn_us(rival, their_iterations, theirs));
    point.moeccl_turns.push_back(turn_us(rival, our_iterations, ours));
  }
  point.count = e.count;
  point.rival_us = median(point.rival_turns);
  point.moeccl_us = median(point.moeccl_turns);
}

}  // namespace

std::vector<VersusPoint> run_versus(const VersusOptions& options, Rival& rival, moecclComm_t comm) {
  if (rival.n_ranks() < 2)
    fail("one rank compares nothing: start this program with mpirun -n 4, or more than one rank");
  // The buffers have a block more than the size, for libraries that reduce within one buffer.
  const size_t most = options.split == Split::kZipf ? static_cast<size_t>(rival.n_ranks()) : 1;  // rank 0's share
  const size_t bytes = options.max_bytes * most + 64;
  const Buffer send(bytes, options.memory), recv(bytes, options.memory);
  const bool apart = !options.rival_on_heap && options.memory == Memory::kHeap;
  const Buffer their_send = apart ? Buffer(bytes, Memory::kMalloc) : Buffer();
  const Buffer their_recv = apart ? Buffer(bytes, Memory::kMalloc) : Buffer();
  Progress progress(rival.rank() == 0);
  std::vector<VersusPoint> points;
  const std::vector<size_t> list = sizes(options);
  for (const VersusOp op : options.ops)
    for (const size_t size : list) points.emplace_back().op = op, points.back().bytes = size;
  // nccl-tests' blocks are whole 16 bytes, so at some sizes there is nothing to send.
  const auto is_empty = [&](const VersusPoint& p) {
    const Exchange e = make_exchange(p.op, p.bytes, options.split, rival);
    return e.count == 0 || e.n_send == 0;
  };
  std::erase_if(points, is_empty);
  for (int look = 0; look < kLooks; ++look) {
    for (size_t i = 0; i < points.size(); ++i) {
      VersusPoint& point = points[i];
      if (look > 0 && !point.is_close()) continue;
      Exchange e = make_exchange(point.op, point.bytes, options.split, rival);
      e.send = reinterpret_cast<float*>(send.data());
      e.recv = reinterpret_cast<float*>(recv.data());
      Exchange theirs = e;
      if (apart) {
        theirs.send = reinterpret_cast<float*>(their_send.data());
        theirs.recv = reinterpret_cast<float*>(their_recv.data());
      }
      progress.show(std::string(op_name(point.op)) + " " + std::to_string(point.bytes), static_cast<double>(i),
                    static_cast<double>(points.size()));
      measure(options, rival, comm, e, theirs, point);
    }
  }
  return points;
}

const char* op_name(VersusOp op) {
  constexpr const char* kNames[] = {"allreduce", "reduce_scatter", "allgather", "alltoall", "alltoallv"};
  return kNames[static_cast<size_t>(op)];
}

}  // namespace perf
