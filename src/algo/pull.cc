// SPDX-License-Identifier: Apache-2.0
#include "src/algo/pull.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kReady = 0;  // the staged chunk can be read
constexpr uint32_t kRead = 1;   // the chunk has been read; signalled where slots are used again

}  // namespace

std::vector<Ref> peers_slots(const Shape& shape, uint32_t rank, uint32_t index, Ref own) {
  std::vector<Ref> srcs;
  for (uint32_t p = 0; p < shape.n_ranks; ++p)
    srcs.push_back(p == rank ? own : part(slot(p, index), own.part, own.parts));
  return srcs;
}

void pull_all_gather(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  b.copy(slot(rank, 0), in(rank));
  b.signal_all(kReady);
  b.copy(out(rank, rank), in(rank));
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kReady);
    b.copy(out(rank, p), slot(p, 0));
  }
}

void pull_reduce_scatter(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.after(i);
    b.copy(slot(rank, p), in(rank, p));
    b.signal(p, kReady);
  }
  b.wait_all(kReady);
  b.reduce(out(rank), peers_slots(shape, rank, rank, in(rank, rank)), true);
}

void pull_all_to_all(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.after(i);
    b.copy(slot(rank, p), in(rank, p));
    b.signal(p, kReady);
  }
  b.copy(out(rank, rank), in(rank, rank));
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kReady);
    b.copy(out(rank, p), slot(p, rank));
  }
}

void pull_broadcast(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  if (rank == shape.root) {
    if (b.depth() > 1) b.wait_all(kRead, b.depth());
    b.copy(slot(rank, 0), in(rank));
    b.signal_all(kReady);
    b.copy(out(rank), in(rank));
  } else {
    b.wait(shape.root, kReady);
    b.copy(out(rank), slot(shape.root, 0));
    if (b.depth() > 1) b.signal(shape.root, kRead);
  }
}

void pull_gather(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  if (rank == shape.root) {
    b.copy(out(rank, rank), in(rank));
    for (uint32_t i = 1; i < shape.n_ranks; ++i) {
      const uint32_t p = b.after(i);
      b.wait(p, kReady);
      b.copy(out(rank, p), slot(p, 0));
      if (b.depth() > 1) b.signal(p, kRead);
    }
  } else {
    if (b.depth() > 1) b.wait(shape.root, kRead, b.depth());
    b.copy(slot(rank, 0), in(rank));
    b.signal(shape.root, kReady);
  }
}

void pull_scatter(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  if (rank == shape.root) {
    for (uint32_t i = 1; i < shape.n_ranks; ++i) {
      const uint32_t p = b.after(i);
      if (b.depth() > 1) b.wait(p, kRead, b.depth());
      b.copy(slot(rank, p), in(rank, p));
      b.signal(p, kReady);
    }
    b.copy(out(rank), in(rank, rank));
  } else {
    b.wait(shape.root, kReady);
    b.copy(out(rank), slot(shape.root, rank));
    if (b.depth() > 1) b.signal(shape.root, kRead);
  }
}

}  // namespace moeccl::algo
